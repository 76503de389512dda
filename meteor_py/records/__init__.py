"""Records and what they are made of: frames, codecs, positions, times, settings, descriptions."""
