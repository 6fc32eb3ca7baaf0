"""The alert rules and the page about monitoring speak of metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.models import tiny
from tests.server.observed import run, serving


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of all samples on /metrics."""
    names, config = set[str](), tmp_path_factory.mktemp("monitoring") / "octavo.toml"
    config.write_text("[scheduler.classes.batch]\n")

    async def test() -> None:
        async with serving(tiny("llama_gqa"), config=config) as server:
            await server.complete([1, 2, 3])
            names.update(name for name, _ in await server.metrics())

    run(test())
    return names


def rules() -> list[dict[str, object]]:
    """All alerts."""
    file = yaml.safe_load((Path(__file__).parents[2] / "docs/deploy/prometheus-rules.yml").read_text())
    return [rule for group in file["groups"] for rule in group["rules"]]


def test_every_alert_uses_metrics_that_are_exported(exported: set[str]) -> None:
    """No alert waits for a name that nobody serves; each has a summary and says what to do."""
    assert len(rules()) >= 10 and len({str(rule["alert"]) for rule in rules()}) == len(rules())
    for rule in rules():
        used = set(re.findall(r"octavo:\w+", str(rule["expr"])))
        assert used and used <= exported, f"{rule['alert']}: {used - exported} are not exported"
        annotations = rule["annotations"]
        assert isinstance(annotations, dict) and set(annotations) == {"summary", "advice"}


def test_the_page_names_metrics_that_are_exported(exported: set[str]) -> None:
    """Whatever is written there as a metric's name."""
    page = (Path(__file__).parents[2] / "docs/howto/monitoring.md").read_text()
    named = set(re.findall(r"`(\w+_(?:total|seconds|perc|slots|blocks|sum))`", page))
    missing = {name for name in named if not any(sample.removeprefix("octavo:").startswith(name) for sample in exported)}
    assert len(named) > 8 and missing <= {"queue_seconds", "first_token_seconds"}, missing
