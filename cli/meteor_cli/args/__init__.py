"""Command-line parsing: positions, times, keys, sizes and input."""
