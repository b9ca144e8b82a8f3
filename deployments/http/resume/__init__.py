"""Streams whose client may come back: their events with ids, kept for a while, and the continuation after an id."""
