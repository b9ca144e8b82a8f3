"""Ranks as Ray actors: where they are placed, how they start, answer, fail and end. Knows nothing of HTTP or text."""
