"""Waiting for a condition with a deadline, instead of sleeping."""

from meteor_py.testing import eventually

__all__ = ["eventually"]
