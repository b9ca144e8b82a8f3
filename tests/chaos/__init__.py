"""Faults at random moments under live streams: `python -m tests.chaos`. No stream may lose, double or change a token."""
