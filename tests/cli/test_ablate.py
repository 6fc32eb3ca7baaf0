"""`octavo ablate`: from a file, a preset or two stacks to a table, a folder and a status."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.__main__ import main
from octavo.bench.ablation import running
from octavo.bench.ablation.result import AblationResult
from octavo.bench.interrupts import RunInterrupted
from octavo.bench.self_checks import TWICE, Checked
from tests.bench.ablation.made import AGAIN, BASE, FAST, PARENTS, made, twice_as_fast
from tests.models import tiny

FILE = """
repeats = 1
[settings]
engine = {{ max_model_len = 64, num_kv_slots = 128, dtype = "float32", device = "cpu" }}
scheduler = {{ max_num_seqs = 4 }}
[scenarios.short]
workload = {{ kind = "random", count = 3, input_len = 6, output_len = 4 }}
load = {{ concurrency = 3 }}
[cells.orca]
preset = "orca"
[cells.other]
parent = "orca"
settings = {{ {change} }}
"""


@pytest.fixture(autouse=True)
def _built_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_NO_PLUGINS", "1")
    monkeypatch.chdir(tmp_path)


def write(change: str = 'allocator = { plugin = "paged" }') -> str:
    Path("paging.toml").write_text(FILE.format(change=change))
    return "paging.toml"


def ablate(*words: str) -> int:
    """Its status; these machines are busy, and these steps take less than a millisecond."""
    return main(["ablate", "--allow-noise", *words])


def test_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed and kept beside the runs, and can be shown again."""
    assert ablate(write(), "--model", str(tiny("llama_gqa")), "--out", "kept") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("# Ablation: paging\n") and "allocator: contiguous -> paged" in printed.out
    assert "* other against orca: fp32: 3/3 the same" in printed.out and "kept in kept" in printed.err
    assert Path("kept/table.md").read_text() == printed.out
    assert len(AblationResult.load("kept").runs) == 3
    assert ablate("--show", "kept") == 0
    assert capsys.readouterr().out == printed.out


def test_two_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    """On the work of `quick`, or of a file's scenarios."""
    words = ["--baseline", "orca", "--candidate", "continuous + paged(block_size = 4)", "--model", str(tiny("llama_gqa"))]
    assert ablate(write(), *words, "--repeats", "2", "--seed", "7", "--out", "kept") == 0
    assert "allocator: contiguous -> paged(block_size=4)" in capsys.readouterr().out
    spec = AblationResult.load("kept").spec
    assert (spec.repeats, spec.seed, list(spec.cells)) == (2, 7, ["baseline", "candidate"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "what is to be compared? Name a TOML file, one of block-size, "),
        (["quik"], "no ablation is called 'quik' (did you mean quick?)"),
        (["--baseline", "orca"], "--baseline and --candidate go together"),
        (["--baseline", "orca", "--candidate", "vllm"], "cells.candidate: it differs from its parent 'baseline' in 2 parts (scheduler: "),
        (["--baseline", "orca", "--candidate", "orca"], "cells.candidate: it is the same as its parent 'baseline'"),
        (["quick", "--set", "engine.max_model_len"], "--set engine.max_model_len: write --set SECTION.NAME=VALUE"),
        (["quick", "--repeats", "0"], "repeats: Input should be greater than or equal to 1 (got 0)"),
        (["--resume", "nowhere"], "nowhere is no result of octavo ablate"),
        (["quick", "--resume", "nowhere"], "--resume goes on with what was begun; leave out spec"),
        (["--show", "nowhere"], "nowhere is no result of octavo ablate"),
    ],
)
def test_mistakes(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, one line, no traceback, before a model is loaded."""
    assert ablate(*words) == 2
    assert f"octavo: {expected}" in capsys.readouterr().err.replace("octavo: ablation quick: ", "octavo: ")


def test_a_folder_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    """A result is not written over."""
    Path("kept").mkdir()
    Path("kept/something").touch()
    assert ablate(write(), "--out", "kept") == 2
    assert "--out kept: it is not empty; name another folder, or go on in it with --resume kept" in capsys.readouterr().err


def test_settings_hold_for_every_cell() -> None:
    """Over the file's own."""
    words = ["--model", str(tiny("llama_gqa")), "--set", "engine.num_kv_slots=192", "--out", "kept"]
    assert ablate(write(), *words) == 0
    assert {cell.pool_slots for cell in AblationResult.load("kept").cells["short"]} == {192}


def test_other_tokens_are_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And no ratio is printed."""
    real = running.drive

    def swapped(engine: Any, *args: Any, **named: Any) -> Any:
        records = real(engine, *args, **named)
        if type(engine.kv).__name__ != "ContiguousAllocator" and "paged" in type(engine.kv).__module__:
            records[1].token_ids[0] = (records[1].token_ids[0] + 1) % 384
        return records

    monkeypatch.setattr(running, "drive", swapped)
    assert ablate(write(), "--model", str(tiny("llama_gqa")), "--out", "kept") == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT: seed 0, item 1, token 0:" in printed and "its tokens are not the parent's" in printed


@pytest.mark.parametrize(("least", "status"), [(1.5, 0), (2.0, 0), (3.0, 1)])
def test_a_claim_that_fails_is_status_1(least: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that holds or is undecided is not. The made runs hold no pool, which is of no interest here."""
    monkeypatch.setattr("octavo.bench.ablation.result.run_checks", lambda run: [])
    result = twice_as_fast(claims=[{"scenario": "s", "cell": "fast", "measure": "output tok/s", "at_least": least}])
    for key, run in list(result.runs.items()):
        result.add(tmp_path, key, run)
    result.save(tmp_path)
    assert ablate("--show", str(tmp_path)) == status


@pytest.mark.parametrize(("check", "allowed"), [("pool empty at the end", False), ("Little's law", True), (TWICE, True)])
def test_a_self_check_that_fails_is_status_1(
    check: str, allowed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever it is, and it is named; what a busy machine can fail is allowed with `--allow-noise`."""
    found = [] if check == TWICE else [Checked(check, problem="1 is not 2")]
    monkeypatch.setattr("octavo.bench.ablation.result.run_checks", lambda run: found)
    result = twice_as_fast() if check != TWICE else made({"base": BASE, f"base{AGAIN}": FAST}, parents=PARENTS)
    for key, run in list(result.runs.items()):
        result.add(tmp_path, key, run)
    result.save(tmp_path)
    for status, flags in ((1, []), (0 if allowed else 1, ["--allow-noise"])):
        assert main(["ablate", "--show", str(tmp_path), *flags]) == status
        said = capsys.readouterr()
        assert f"self-check failed: {check}: the table says where" in said.err
        assert f"* FAILED: s{'' if check == TWICE else '/base/0'}: {check}: " in said.out


def test_ctrl_c_is_130_and_resuming_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What there is has a table, and the line says how to go on."""
    real, calls = running.drive, []

    def interrupted(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RunInterrupted([])
        return real(*args, **named)

    monkeypatch.setattr(running, "drive", interrupted)
    assert ablate(write(), "--model", str(tiny("llama_gqa")), "--out", "kept") == 130
    printed = capsys.readouterr()
    assert "interrupted; go on with: octavo ablate --resume kept" in printed.err and "| orca" in printed.out
    assert ablate("--resume", "kept") == 0
    assert "* other against orca: fp32: 3/3 the same" in capsys.readouterr().out


def test_help_needs_no_torch() -> None:
    """It names the presets; torch is imported for a run only."""
    import subprocess

    code = "import sys, octavo.__main__ as m\ntry: m.main(['ablate', '--help'])\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("False\n") and "prefix-share" in done.stdout
