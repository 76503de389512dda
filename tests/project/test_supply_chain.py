"""Dependencies are pinned by hash for development and CI, and bounded for users."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
#: New major versions of these appear often, and do not break the parts that we use.
UNBOUNDED = {"pyarrow"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked() -> list[tuple[Requirement, int]]:
    """Return the pinned requirements, and the number of hashes for each."""
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements-dev.txt").read_text().strip())
    return [(Requirement(entry.split("\\")[0]), entry.count("--hash=sha256:")) for entry in entries]


def test_every_locked_package_has_one_version_and_hashes_and_names_no_index() -> None:
    for requirement, hashes in locked():
        assert re.fullmatch(r"==[^*]+", str(requirement.specifier)), requirement
        assert hashes, requirement
    assert not re.search(r"://|--index|--find-links", (ROOT / "requirements-dev.txt").read_text())


def test_locked_versions_satisfy_the_declared_dependencies() -> None:
    pins = {requirement.name.lower(): str(requirement.specifier)[2:] for requirement, _ in locked()}
    settings = project()
    groups = settings["dependency-groups"]
    for text in [*settings["project"]["dependencies"], *groups["test"], *groups["lint"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), text


def test_runtime_dependencies_have_an_upper_bound() -> None:
    settings = project()["project"]
    extras = [text for group in settings["optional-dependencies"].values() for text in group]
    for text in [*settings["dependencies"], *extras]:
        requirement = Requirement(text)
        bounded = any(specifier.operator == "<" for specifier in requirement.specifier)
        assert bounded or requirement.name in UNBOUNDED, text


def test_compose_images_are_pinned_to_a_minor_version() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {"redis", "replica", "demo", "cluster-1", "sentinel-1"} <= services.keys()
    for name, service in services.items():
        assert re.search(r":\d+\.\d+", service["image"]), name
