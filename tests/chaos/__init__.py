"""Faults at random moments under live streams: `python -m tests.chaos`. No stream may lose, repeat or change a token."""
