"""Shared subscribers: several consumers of one stream at a time, each ordering key in order."""
