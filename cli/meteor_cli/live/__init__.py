"""Live views of a server: ``top``, ``watch`` and ``peers watch``."""
