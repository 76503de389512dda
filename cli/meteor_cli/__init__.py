"""The ``meteor`` command."""
