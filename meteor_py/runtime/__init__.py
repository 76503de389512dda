"""Threads, locks, clocks and closing: what every other package runs on."""
