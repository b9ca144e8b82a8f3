"""The same loads for others: each driver runs in its peer's own environment and needs nothing else of this repository's."""
