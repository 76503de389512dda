"""The version. It has its own file, so that the build can read it without importing anything."""

__version__ = "0.3.0.dev0"
