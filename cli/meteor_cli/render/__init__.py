"""How results are shown: text, tables, JSON, templates; and what keeps a terminal safe."""
