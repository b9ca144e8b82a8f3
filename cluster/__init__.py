"""Ranks as Ray actors: placement, start, steps, failures, end. Knows nothing of HTTP or text."""
