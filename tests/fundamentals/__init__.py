"""The product's promises, one per file, written to be read as documentation."""
