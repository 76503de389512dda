"""What people write on the command line, and what it means: positions, times, ids, sizes."""
