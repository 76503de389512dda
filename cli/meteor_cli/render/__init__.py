"""Output: text, tables, JSON, templates, and escaping of untrusted text."""
