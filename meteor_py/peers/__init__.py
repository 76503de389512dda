"""Peer groups: who is there, who leads, messages, votes, and things done at one time."""
