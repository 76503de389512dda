"""Shared subscribers: several consumers process one stream and keep each ordering key in order."""
