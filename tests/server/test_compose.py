"""Flags, health checks and commands in docker-compose.yml work on real servers, without Docker."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.support.servers import HOST, Server, binaries
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def flags(service: str) -> list[str]:
    """Return a service's arguments for redis-server."""
    program, *arguments = SERVICES[service]["command"]
    assert program == "redis-server"
    return list(arguments)


def settings(arguments: list[str]) -> dict[str, str]:
    """Parse arguments of the form `--name value...`."""
    found: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.removeprefix("--")
            found[name] = []
        else:
            found[name].append(argument)
    return {name: " ".join(values) for name, values in found.items()}


@pytest.fixture(params=sorted(binaries()))
def services(request: pytest.FixtureRequest) -> Iterator[dict[str, Server]]:
    """The services `redis` and `replica`, running with their flags on free local ports."""
    binary = binaries()[request.param]
    with Server(binary, *flags("redis")) as redis:
        here = {"redis": HOST, "6379": str(redis.port)}
        with Server(binary, *[here.get(flag, flag) for flag in flags("replica")]) as replica:
            yield {"redis": redis, "replica": replica}


def test_servers_accept_every_flag_and_the_replica_follows(services: dict[str, Server]) -> None:
    for name, server in services.items():
        for setting, value in settings(list(server.args)).items():
            expected = {"512mb": str(512 << 20)}.get(value, value)
            assert server.client().config_get(setting) == {setting: expected}, name
    host, port = settings(flags("replica"))["replicaof"].split()
    assert host in SERVICES
    assert port == "6379"
    services["redis"].client().set("key", "value")
    eventually(lambda: services["replica"].client().get("key") == b"value")


def test_compose_settings_prevent_eviction_and_sync_to_disk_every_second() -> None:
    for service in ("redis", "replica"):
        given = settings(flags(service))
        assert given["appendonly"] == "yes"
        assert given["appendfsync"] == "everysec"
        assert given["maxmemory-policy"] == "noeviction"
        assert given["maxmemory"] != "0"


def test_health_check_distinguishes_a_working_server_from_a_dead_one(
    services: dict[str, Server],
) -> None:
    if not shutil.which("redis-cli"):
        assert os.environ.get("CI") != "true", "redis-cli is missing"
        pytest.skip("redis-cli is not on PATH (Debian: apt-get install redis-tools).")

    def healthy(service: str) -> bool:
        kind, *command = SERVICES[service]["healthcheck"]["test"]
        assert kind in ("CMD", "CMD-SHELL")
        here = f"redis-cli -p {services[service].port}"
        line = " ".join(command).replace("redis-cli", here)
        return subprocess.run(["sh", "-c", line], capture_output=True).returncode == 0

    eventually(lambda: healthy("redis") and healthy("replica"))
    services["redis"].kill()
    eventually(lambda: not healthy("redis") and not healthy("replica"))


def test_services_store_their_data_in_a_named_volume() -> None:
    for service in ("redis", "replica"):
        (volume,) = SERVICES[service]["volumes"]
        name, path = volume.split(":")
        assert name in COMPOSE["volumes"]
        assert path == "/data"  # the directory to which the image's redis-server writes


def test_ports_are_open_to_this_machine_only() -> None:
    for service in ("redis", "replica"):
        (port,) = SERVICES[service]["ports"]
        assert port.startswith("127.0.0.1:")
        assert port.endswith(":6379")


def test_services_wait_until_redis_is_healthy() -> None:
    for service in ("replica", "demo"):
        assert SERVICES[service]["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_demo_connects_to_the_redis_service() -> None:
    url = urlsplit(SERVICES["demo"]["command"][-1].partition(" --url ")[2])
    assert url.scheme == "redis"
    assert url.hostname in SERVICES
    assert url.port == 6379


def test_demo_installs_the_mounted_source_and_runs_an_existing_command() -> None:
    shell, option, line = SERVICES["demo"]["command"]
    assert (shell, option) == ("sh", "-c")
    install, run = line.split(" && exec ")
    source, mode = SERVICES["demo"]["volumes"][0].removeprefix(".:").split(":")
    assert install.startswith("pip install ")
    assert install.endswith(f" {source}")
    assert mode == "ro"
    program, *arguments = run.split()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, _ = scripts[program].partition(":")
    subprocess.run([sys.executable, "-m", module, *arguments, "--help"], cwd=ROOT, check=True)


def test_demo_uses_a_supported_python_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = SERVICES["demo"]["image"].removeprefix("python:").removesuffix("-slim")
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
