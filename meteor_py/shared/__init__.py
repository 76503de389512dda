"""Shared subscribers: several consumers of one stream at a time, each group of records in order."""
