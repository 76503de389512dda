"""Threads, locks, the clock, backoff, completions, and the order in which objects are closed."""
