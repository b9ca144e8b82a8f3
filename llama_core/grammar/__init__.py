"""Grammars that answers follow, by llguidance: built and checked in the replica, compiled and followed on rank 0."""
