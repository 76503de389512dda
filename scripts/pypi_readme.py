"""A hatchling metadata hook: the README without relative links, which do not work on PyPI.

If ``[project.urls]`` names a ``Repository``, relative links and images point there. Otherwise, the
links become plain text and the images are omitted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


class PyPIReadme(MetadataHookInterface):
    """Sets ``project.readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository", "")
        readme = absolute(text, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def absolute(text: str, repository: str) -> str:
    """Make relative links point to ``repository``. If it is empty, keep labels and omit images."""

    def replace(link: re.Match[str]) -> str:
        picture, label, target = link.groups()
        if not repository:
            return "" if picture else label
        kind = "raw" if picture else "blob"
        return f"{picture}[{label}]({repository.rstrip('/')}/{kind}/HEAD/{target})"

    return _LINK.sub(replace, text)
