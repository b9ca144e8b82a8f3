"""Requests stored with all that their tokens depend on, so that they can be sent again and compared."""
