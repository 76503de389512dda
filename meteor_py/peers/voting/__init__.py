"""Votes of a peer group, and actions at an agreed time."""
