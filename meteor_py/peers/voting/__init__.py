"""Peer group votes, and actions at an agreed time."""
