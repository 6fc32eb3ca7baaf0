"""The tutorial about measuring: its files are written and its commands run, in order, with a tiny model; its counts come out."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from octavo.__main__ import main
from octavo.bench.ablation.result import AblationResult
from octavo.bench.ablation.summary import summarise
from octavo.bench.runs import Run
from octavo.cli import build_parser
from tests.models import tiny

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial/measuring.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(| fails)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [(line, bool(fails)) for kind, fails, text in BLOCKS if kind == "sh" for line in text.splitlines()]
ON_CPU = ["--set", "engine.device=cpu"]
BUSY = ["--allow-noise"]  # such small steps, on a machine that does other things
IN_SMALL = {
    ("bench", "serve"): [*ON_CPU, "--set", "engine.dtype=float32", "--no-probe", "--disable-tqdm", *BUSY],
    ("bench", "report"): ["--no-plots", *BUSY],
    ("bench", "keep"): BUSY,
    ("bench", "compare"): BUSY,
}


def table(head: str) -> list[list[float]]:
    """The numbers of the table that begins with that column."""
    found = re.search(rf"^\| {head} .*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE)
    assert found is not None, head
    return [[float(cell) for cell in line.strip("|\n ").split("|")] for line in found[1].splitlines()]


@pytest.mark.parametrize("command", [command for command, _ in COMMANDS if command.startswith("octavo")])
def test_a_command_is_one(command: str) -> None:
    """With all its flags."""
    words = shlex.split(command)[1:]
    assert build_parser(words[0]).parse_args(words).command == words[0]


def test_every_step_of_the_tuning_order_has_a_command() -> None:
    """Memory, context, budget, requests at once, in this order."""
    places = [PAGE.index(word) for word in ("num_kv_slots=8192", "max_model_len=256", "ablate budget.toml", "max_num_seqs=4 ")]
    assert places == sorted(places)


def run(command: str, model: Path) -> int:
    """In this process, in small."""
    words = shlex.split(command)
    if words[0] == "python":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [words[1], *words[2:]])
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
        return 0
    words = [str(model) if word == "smollm2-135m" else word for word in words[1:]]
    if words[0] == "ablate":
        return main([*words, "--model", str(model), "--repeats", "2", *ON_CPU, *BUSY])
    return main([*words, *IN_SMALL.get((words[0], words[1]), [])])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OCTAVO_NO_PLUGINS", "1")
    for kind, _, text in BLOCKS:
        if kind != "sh":
            name = "requests.csv" if kind == "csv" else text.partition("\n")[0].removeprefix("# ")
            Path(name).write_text(text)
    model = tiny("llama_gqa", max_position_embeddings=2048)
    for command, fails in COMMANDS:
        status = run(command, model)
        said = capsys.readouterr()
        if fails:
            assert status == 2 and "make it smaller" in said.err, said.err
        else:
            assert status == 0, f"{command}: {status}\n{said.err}"
        if "recompute" in command:
            assert "mixed-lengths\tpaged\treserved\toutput tok/s\t" in said.out
        if "compare" in command:
            assert "0 of 8 slower, 0 too noisy to say." in said.out

    claim = AblationResult.load("claim")
    reserved, paged = (summarise(claim.of("mixed-lengths", name)) for name in ("reserved", "paged"))
    assert (reserved.peak_running, paged.peak_running) == (4, 24)
    assert reserved.kv_shares["internal"] > 50 > 5 > paged.kv_shares["internal"]
    assert len(AblationResult.load("budget").runs) == 8
    for pool, preemptions, steps, rows in table("pool"):
        one = Run.load(f"results/pool-{pool:g}")
        assert counts(one) == (preemptions, steps)
        assert sum(line.num_rows for line in one.steps) / steps == pytest.approx(rows, abs=0.05)
    for context, at_once, steps in table("longest context"):
        one = Run.load(f"results/context-{context:g}")
        assert (max(line.num_running for line in one.steps), len(one.steps)) == (at_once, steps)
    for seats, preemptions, steps in table("`max_num_seqs`"):
        assert counts(Run.load(f"results/seats-{seats:g}")) == (preemptions, steps)


def counts(run: Run) -> tuple[int, int]:
    """Preemptions and steps."""
    return sum(record.num_preemptions for record in run.records), len(run.steps)
