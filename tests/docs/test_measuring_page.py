"""The tutorial about measuring: its files are written and its commands run, in order, with a tiny model; its counts come out."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo.__main__ import main
from octavo.bench.ablation.result import AblationResult
from octavo.bench.ablation.spec import read_spec
from octavo.bench.ablation.summary import summarise
from octavo.bench.load.process import ServerProcess
from octavo.bench.runs import Run
from octavo.cli import build_parser
from octavo.core.settings.presets import PRESETS
from tests.models import tiny

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial/measuring.md").read_text()
URL = "http://127.0.0.1:8000"
ON_CPU = ["--set", "engine.device=cpu"]
BUSY = ["--allow-noise"]  # such small steps, on a machine that does other things
IN_SMALL = {
    ("bench", "serve"): [*ON_CPU, "--set", "engine.dtype=float32", "--no-probe", "--disable-tqdm", *BUSY],
    ("bench", "report"): ["--no-plots", *BUSY],
    ("bench", "keep"): BUSY,
    ("bench", "compare"): BUSY,
}
FOUND = {  # by section, the settings that it looks for
    "4": {"engine.num_kv_slots"},
    "5": {"engine.max_model_len"},
    "6": {"scheduler.plugin", "scheduler.max_num_batched_tokens"},
    "7": {"scheduler.max_num_seqs"},
}
INSTEAD = {"engine.gpu_memory_utilization", "engine.kv_cache_memory"}  # the pool's size in other words
PREEMPTION = {"scheduler.preemption", "engine.swap_space"}  # compared, and left as they were
HERE = r"With these lengths that is about (\d+) % of the pool, as is claimed;\npaged, it is less than (\d+) %"


@dataclass(frozen=True)
class Block:
    """What stands between two fences, by the number of its section."""

    section: str
    kind: str
    text: str


def blocks() -> list[Block]:
    """All of the page, in its order; `kind` is all that the fence says."""
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        for kind, text in re.findall(r"^```(.+)\n((?:.*\n)*?)```$", section, flags=re.MULTILINE):
            found.append(Block(section.partition(".")[0], kind, text))
    return found


BLOCKS = blocks()
SHELL = [block for block in BLOCKS if block.kind.startswith("sh")]
COMMANDS = [line for block in SHELL for line in block.text.splitlines()]


def name_of(block: Block) -> str:
    """Of the file that a block is."""
    return "requests.csv" if block.kind == "csv" else block.text.partition("\n")[0].removeprefix("# ")


def flat(file: str) -> dict[str, Any]:
    """A config file's settings, as `--set` names them."""
    return {f"{section}.{name}": value for section, table in tomllib.loads(file).items() for name, value in table.items()}


def settings_of(command: str) -> dict[str, str]:
    """What it says with `--set`."""
    return dict(word.split("=", 1) for word in re.findall(r"--set (\S+)", command))


def table(head: str) -> list[list[str]]:
    """The cells of the table that begins with that column."""
    found = re.search(rf"^\| {head} .*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE)
    assert found is not None, head
    return [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in found[1].splitlines()]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("octavo")])
def test_a_command_is_one(command: str) -> None:
    """With all its flags."""
    words = shlex.split(command)[1:]
    assert build_parser(words[0]).parse_args(words).command == words[0]


def test_every_step_of_the_tuning_order_uses_what_was_found_before() -> None:
    """Memory, context, budget, requests at once: each looks for its own setting alone, over all that was found, and adds it."""
    versions = {block.section: flat(block.text) for block in BLOCKS if name_of(block) == "settings.toml"}
    first = next(block for block in BLOCKS if name_of(block) == "settings.toml")
    known = flat(first.text)  # a guess
    assert list(versions) == list(FOUND) and set(known) == FOUND["5"]
    for section, sought in FOUND.items():
        tried: dict[str, set[str]] = {}
        commands = [line for block in SHELL if block.section == section for line in block.text.splitlines()]
        for command in commands:
            given = settings_of(command)
            assert set(given) <= sought | (INSTEAD if section == "4" else PREEMPTION if section == "7" else set()), command
            for setting, value in given.items():
                tried.setdefault(setting, set()).add(value)
            if command.startswith("octavo bench serve"):
                assert "--config settings.toml" in command
        for block in BLOCKS:
            if block.section == section and name_of(block) == "budget.toml":
                spec = read_spec({"name": "budget", **tomllib.loads(block.text)}, origin="the page")
                common = {f"{part}.{name}": value for part, options in spec.settings.items() for name, value in options.items()}
                assert common == known | {"engine.dtype": "float32"}
                assert spec.cells["chat"].settings["scheduler"] == PRESETS["chat"].settings["scheduler"]
                for cell in spec.cells.values():
                    for name, value in cell.settings.get("scheduler", {}).items():
                        tried.setdefault(f"scheduler.{name}", set()).add(str(value))
        now = versions[section]
        changed = {setting for setting, value in now.items() if known.get(setting) != value}
        assert changed == sought and known.keys() <= now.keys()
        assert all(str(now[setting]) in tried[setting] for setting in sought), section
        known = now
    last = BLOCKS[next(n for n, block in enumerate(BLOCKS) if (block.section, block.kind) == ("8", "sh server"))]
    assert "--config settings.toml" in last.text and "--set" not in last.text


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
    """All of it, but for what has a server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OCTAVO_NO_PLUGINS", "1")
    model = tiny("llama_gqa", max_position_embeddings=8192)
    told: dict[str, str] = {}
    for block in BLOCKS:
        if block.kind in ("csv", "toml"):
            Path(name_of(block)).write_text(block.text)
        if block.kind not in ("sh", "sh fails"):
            continue
        for command in block.text.splitlines():
            status = run(command, model)
            said = capsys.readouterr()
            told[command] = said.err
            if block.kind == "sh fails":
                assert status == 2 and "make it smaller" in said.err, said.err
            else:
                assert status == 0, f"{command}: {status}\n{said.err}"
            if "recompute.py" in command:
                assert "mixed-lengths\tpaged\treserved\toutput tok/s\t" in said.out
            if "gpu_memory_utilization" in command:
                assert "gpu_memory_utilization is unused on a CPU" in said.err
            if "bench compare" in command:
                assert "0 of 8 slower, 0 too noisy to say." in said.out

    claim = AblationResult.load("claim")
    reserved, paged = (summarise(claim.of("mixed-lengths", name)) for name in ("reserved", "paged"))
    assert (reserved.peak_running, paged.peak_running) == (4, 24)
    claimed, here = (re.search(text, PAGE) for text in (r"waste (\d+) to (\d+) % of the KV memory", HERE))
    assert claimed is not None and here is not None
    (low, high), (about, most) = (map(int, found.groups()) for found in (claimed, here))
    assert reserved.kv_shares["internal"] == pytest.approx(about, abs=5) and low <= reserved.kv_shares["internal"] <= high
    assert paged.kv_shares["internal"] < most
    assert len(AblationResult.load("budget").runs) == 10
    for pool, *counts in table("pool"):
        one = Run.load(f"results/pool-{pool}")
        assert counts == [preemptions(one), str(len(one.steps)), f"{sum(line.num_rows for line in one.steps) / len(one.steps):.1f}"]
    for context, concurrency, cut in table("longest context"):
        (said_of_it,) = (said for command, said in told.items() if settings_of(command).get("engine.max_model_len") == context)
        assert f"Maximum concurrency for {context} tokens per request: {concurrency}x" in said_of_it
        assert (f"{cut} of 40 requests are cut to fit" in said_of_it) == (cut != "0")
    for preset, *counts in table("preset"):
        one = Run.load(f"results/{preset}")
        assert counts == [str(len(one.steps)), f"{max(line.num_tokens for line in one.steps):,}"]
    for seats, *counts in table("`max_num_seqs`"):
        one = Run.load(f"results/seats-{seats}")
        assert counts == [preemptions(one), str(len(one.steps))]
    for how, *counts in table("preemption"):
        one = Run.load(f"results/{how}")
        computed, again = (sum(getattr(line, name) for line in one.steps) for name in ("num_tokens", "num_recomputed"))
        moved = sum(count for line in one.steps for count in line.transfers.values())
        assert counts == [preemptions(one), f"{computed:,}", f"{again:,}", f"{moved:,}"]


def preemptions(one: Run) -> str:
    """Of all requests."""
    return str(sum(record.num_preemptions for record in one.records))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_the_doctor_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A server with a small pool, under load: all three judgements. The table of that load. With the settings found: none of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OCTAVO_NO_PLUGINS", "1")
    Path("settings.toml").write_text([block.text for block in BLOCKS if name_of(block) == "settings.toml"][-1])
    judgements = {"memory-bound", "over-committed", "saturated"}
    (before, printed), (after, _) = (under_load(section, capfd) for section in ("3", "8"))
    assert judgements <= before
    assert not judgements & after

    (shown,) = (block.text for block in BLOCKS if block.kind == "text doctor")
    assert set(judgements_in(shown)) == judgements
    (wanted,) = (block.text for block in BLOCKS if block.kind == "text table")
    assert [line[:40] for line in printed.splitlines()] == [line[:40] for line in wanted.splitlines()]
    of_lengths = ("Successful requests:", "Total input tokens:", "Total generated tokens:")
    counts = [[line for line in text.splitlines() if line.startswith(of_lengths)] for text in (printed, wanted)]
    assert counts[0] == counts[1]


def judgements_in(said: str) -> list[str]:
    """What the doctor finds, without its figures and advice."""
    return [line.partition(":")[0] for line in said.splitlines()[1:] if line and not line.startswith(" ")]


def under_load(section: str, capfd: pytest.CaptureFixture[str]) -> tuple[set[str], str]:
    """All judgements that a section's doctor gives while its load runs, and what the load prints."""
    model = str(tiny("llama_gqa", max_position_embeddings=8192))
    commands = {block.kind: block.text for block in SHELL if block.section == section and block.kind != "sh"}
    here = {kind: [model if word == "smollm2-135m" else word for word in shlex.split(text)[1:]] for kind, text in commands.items()}
    server = here["sh server"]
    assert server[0] == "serve" and server[server.index("--port") + 1] == "8000"
    del server[server.index("--port") : server.index("--port") + 2]
    with ServerProcess([*server[1:], "--device", "cpu", "--dtype", "float32"]) as process:
        load, doctor = ([process.url if word == URL else word for word in here[kind]] for kind in ("sh load", "sh doctor"))
        rate = ["--request-rate", "1000"] if "--request-rate" in load else []  # a tiny model keeps up with 20 a second
        words = [sys.executable, "-m", "octavo", *load, *rate, "--no-probe", "--disable-tqdm", *BUSY]
        said: set[str] = set()
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
            while asking.poll() is None:
                assert main([*doctor, "--interval", "0.2"]) in (0, 1)
                said.update(judgements_in(capfd.readouterr().out))
            printed, errors = asking.communicate()
        assert asking.returncode == 0, errors
    return said, printed.rstrip("\n") + "\n"
