"""The promises of the product, one file each, written to be read as documentation."""
