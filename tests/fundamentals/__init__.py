"""The promises of the product, one per file, written to be read as documentation."""
