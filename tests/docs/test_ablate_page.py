"""docs/howto/ablate.md: its commands are ones that `octavo` takes, its file is one that `octavo ablate` runs, and it names every preset."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from octavo.bench.ablation.cells import make_cells
from octavo.bench.ablation.claims import check_claims
from octavo.bench.ablation.measures import find_measure
from octavo.bench.ablation.presets import find_spec, preset_names
from octavo.bench.ablation.spec import AblationSpec, CellSpec, ClaimSpec, ScenarioSpec, read_spec
from octavo.bench.ablation.works import scenario_work
from octavo.cli import build_parser
from octavo.core.registry import Registry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/ablate.md").read_text()
COMMANDS = re.findall(r"^    (octavo .*|python .*)$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page(command: str) -> None:
    """With all its flags; a script is there, and what is to be compared is a file or a preset."""
    program, *words = shlex.split(command, comments=True)
    if program == "python":
        assert (ROOT / words[0]).is_file()
        return
    args = build_parser(words[0]).parse_args(words)
    assert args.command == words[0]
    if getattr(args, "spec", None) is not None:
        assert args.spec.endswith(".toml") or args.spec in preset_names()


def test_there_are_some() -> None:
    """Of what is run, seen, and computed again."""
    assert len(COMMANDS) >= 8
    assert {tuple(shlex.split(command)[:2]) for command in COMMANDS} == {
        ("octavo", "ablate"), ("octavo", "bench"), ("python", "docs/howto/recompute.py"),
    }  # fmt: skip


def test_the_file_of_the_page() -> None:
    """It is read, each cell differs from its parent by one part, its measures and claims have requests, and its work fits."""
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    spec = read_spec({"name": "my", **tomllib.loads(text)}, origin="the page")
    registry = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
    check_claims(spec)
    assert spec.claims and spec.scenarios
    for scenario, given in spec.scenarios.items():
        cells = make_cells(registry, spec, scenario)
        assert {cell.name for cell in cells} >= spec.cells.keys()
        length = cells[0].config.engine.max_model_len or 0
        work = scenario_work(given, scenario, seed=0, vocab_size=49152, max_model_len=length)
        assert max(work.prompt_len(index) + item.output_len for index, item in enumerate(work.items)) <= length
        classes = {find_measure(measure).class_name for measure in (*spec.compared, *(claim.measure for claim in spec.claims))}
        assert classes <= {None, *(item.class_name for item in work.items)}


def test_the_keys_of_the_page() -> None:
    """Those that it speaks of below the file are ones that a file may have."""
    told = PAGE.partition("At the top there may also be")[2].partition("\n\n")[0]
    known = {name for spec in (AblationSpec, ScenarioSpec, CellSpec, ClaimSpec) for name in spec.model_fields}
    keys = set(re.findall(r"`(\w+)(?: = [^`]+)?`", told))
    assert {"summary", "optional", "of_bound", "lost_at_most"} <= keys <= known


def test_every_preset_is_named() -> None:
    """In the table of those that come with Octavo, and nothing else is."""
    table = PAGE.partition("## Those that come with Octavo")[2].partition("\n## ")[0]
    named = [name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w-]+)`", line.split("|")[1])]
    assert sorted(named) == preset_names()


def test_the_block_tables_of_reranking() -> None:
    """Entries of 64 requests and of the one long one, as tests/bench/ablation/test_presets.py counts them in the pool."""
    given = find_spec("rerank").scenarios
    lengths = {}
    for scenario in ("point-wise", "list-wise"):
        work = scenario_work(given[scenario], scenario, seed=0, vocab_size=49152, max_model_len=2048)
        lengths[scenario] = next(len(item.prompt) for item in work.items if item.class_name == "rerank")
    at_once, alone = 64 * -(-lengths["point-wise"] // 16), -(-lengths["list-wise"] // 16)
    assert f"| {at_once} entries at 64 at once; {alone} of the one long request alone |" in PAGE
    assert f"as one of {lengths['list-wise']:,}." in PAGE
