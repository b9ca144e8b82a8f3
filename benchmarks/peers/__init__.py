"""The same loads for peers. Each driver runs in its peer's own environment and imports little else of this repository."""
