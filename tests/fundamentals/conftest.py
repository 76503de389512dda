"""Fixtures for these tests: a client for an empty server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import meteor_py as meteor


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m
