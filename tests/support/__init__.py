"""Test equipment: everything that tests share, and no tests."""
