"""Parsing of the command line: positions, times, keys, sizes, input."""
