"""Views that follow a server as it changes: ``top``, ``watch`` and ``peers watch``."""
