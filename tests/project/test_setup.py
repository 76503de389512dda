"""The setup scripts install missing programs, or say how to install them.

A PATH with few programs simulates a machine that lacks all other programs.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
JAVA = "#!/bin/sh\necho 'openjdk version \"{}.0.1\" 2025-04-15' >&2\n"


class Machine:
    """A directory with a copy of the scripts and the available programs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.programs = root / "bin"
        self.programs.mkdir()
        shutil.copytree(SCRIPTS, root / "scripts")
        for name in ("sh", "sed", "head", "dirname", "basename", "cat", "chmod"):
            self.programs.joinpath(name).symlink_to(str(shutil.which(name)))
        self.add("id", "#!/bin/sh\necho 1000\n")

    def add(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def add_apt(self, package: str, java: str) -> None:
        """Simulate root on a Debian machine where installing ``package`` creates ``java``."""
        self.add("id", "#!/bin/sh\necho 0\n")
        self.add("java.package", java)
        install = f'*" {package}") cat {self.programs}/java.package >{self.programs}/java'
        install += f"; chmod +x {self.programs}/java;;"
        self.add("apt-get", f'#!/bin/sh\ncase "$*" in update*) ;; {install} *) exit 100;; esac\n')

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / "scripts" / script],
            env={"PATH": str(self.programs)}, check=False, capture_output=True, text=True,
            timeout=30,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_recent_java_is_used(machine: Machine) -> None:
    machine.add("java", JAVA.format(21))
    assert machine.run("java.sh").stdout == "Java 21 is ready.\n"


@pytest.mark.parametrize("version", [17, 21])
@pytest.mark.parametrize("old", [None, JAVA.format(11)])
def test_missing_or_old_java_is_installed_with_apt(
    machine: Machine, version: int, old: str | None
) -> None:
    machine.add_apt(f"openjdk-{version}-jre-headless", JAVA.format(version))
    if old:
        machine.add("java", old)
    done = machine.run("java.sh")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"Java {version} is ready.")


def test_missing_java_and_apt_are_reported_on_one_line(machine: Machine) -> None:
    done = machine.run("java.sh")
    assert done.returncode == 1
    assert done.stderr.startswith("Spark needs Java 17 or newer: install it")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("python", [None, "#!/bin/sh\nexit 1\n"])
def test_missing_recent_python_is_reported_on_one_line(
    machine: Machine, python: str | None
) -> None:
    if python:
        machine.add("python3", python)
    done = machine.run("setup.sh")
    assert done.returncode == 1
    assert done.stderr == "meteor_py needs Python 3.11 or newer: install it, then run make again.\n"


def test_missing_venv_is_reported_with_its_package(machine: Machine) -> None:
    machine.add("python3", '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\n')
    done = machine.run("setup.sh")
    assert done.returncode == 1
    assert "sudo apt-get install python3-venv" in done.stderr
