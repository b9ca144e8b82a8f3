"""Streams whose client may come back: ids that count tokens, the rest after an id, and what a replica keeps to save work."""
