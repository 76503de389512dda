"""Records, frames, codecs, positions, times, settings and descriptions."""
