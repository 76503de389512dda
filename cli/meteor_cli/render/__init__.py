"""Output: text, tables, JSON, templates, and protection of the terminal from untrusted text."""
