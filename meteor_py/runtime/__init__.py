"""Threads, locks, signals, the clock, backoff, completions, and the closing of open objects."""
