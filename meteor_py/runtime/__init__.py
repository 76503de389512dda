"""Threads, locks, the clock, backoff, completions, and closing in order."""
