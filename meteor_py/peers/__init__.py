"""Peer groups: membership, leader election, messages, votes, and timed actions."""
