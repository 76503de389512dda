"""Votes of a peer group, and the actions that its members agree on."""
