"""A saved run is the same when it is read; older versions are read too; what is damaged is said, and where."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.__main__ import main
from octavo.bench import runs
from octavo.bench.figures import read_figures
from octavo.bench.memory_table import MemoryTable
from octavo.bench.runs import HEADER, REQUESTS, SCHEMA_VERSION, STEPS, WORK, Run, Stored, is_complete
from octavo.bench.schema import migrated
from octavo.bench.self_checks import failed_checks
from octavo.core.errors import ConfigError, ResultError
from tests.bench.measured import measured, timed
from tests.bench.test_compare import IDENTITY
from tests.bench.test_self_checks import STACKS

VERSION_1 = Path(__file__).parent / "fixtures" / "run_v1"
MEMORY = MemoryTable(device="cpu", total=100, weights=10, kv_cache=20, activations=3, other=4, free=50, peak=37, num_slots=60)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    timed("prefix", "chunked").save(tmp_path / "run")
    return tmp_path / "run"


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every field of every record, step, event and of the identity; and the account is the same to the last digit."""
    stack = next(s for s in STACKS if (s.scheduler.name, s.allocator.name, s.kernel.name) == ("chunked", "prefix", "sdpa"))
    run = replace(measured(stack), memory=MEMORY, complete=False, stopped_by="RuntimeError: no", failed=True)
    run.save(tmp_path / "a" / "run")
    back = Run.load(tmp_path / "a" / "run")
    assert back == replace(run, work=replace(run.work, items=list(run.work.items)))
    assert back.account.shares == run.account.shares
    assert back.work.digest == run.work.digest == run.identity.workload_hash if run.identity else False


def test_the_files_are_plain_json(saved: Path) -> None:
    """A line is what its name says, and what is as ever is left out."""
    header = json.loads((saved / HEADER).read_text())
    assert header["schema_version"] == SCHEMA_VERSION and header["complete"] is True
    steps = [json.loads(line) for line in (saved / STEPS).read_text().splitlines()]
    assert len(steps) == header["num_steps"] and "error" not in steps[0]
    assert steps[0]["events"][0] == {"kind": "taken", "start": 0, "count": 4, "owner": "0/0"}
    assert len((saved / REQUESTS).read_text().splitlines()) == len((saved / WORK).read_text().splitlines()) == 12


def test_a_run_of_version_1_is_read(tmp_path: Path) -> None:
    """The folder was written by the first version and is never written again: what it says must go on being understood."""
    run = Run.load(VERSION_1)
    assert (run.work.name, len(run.records), run.complete) == ("some", 12, True)
    assert run.identity is not None and run.identity.stack["allocator"] == "prefix"
    assert run.memory == MEMORY
    assert failed_checks(run) == []
    assert all(record.added is None for record in run.records) and not run.failed and run.parts == []
    assert run.account.shares.total == pytest.approx(100)
    assert {name: round(share, 4) for name, share in asdict(run.account.shares).items()} == json.loads(
        (VERSION_1 / "shares.json").read_text()
    )
    run.save(tmp_path / "again")
    assert Run.load(tmp_path / "again") == run


def test_older_versions_are_brought_up_one_by_one() -> None:
    """Each migration makes the next version of what the one before made; none is skipped."""

    def rename(old: str, new: str) -> Callable[[Stored], Stored]:
        def change(stored: Stored) -> Stored:
            return replace(stored, requests=[{new: request[old]} for request in stored.requests])

        return change

    stored = Stored({"schema_version": 1}, [], [{"a": 7}], [])
    found = migrated(stored, {1: rename("a", "b"), 2: rename("b", "c")}, where=Path("x"), to=3, header=lambda one: one.header)
    assert found.requests == [{"c": 7}] and found.header["schema_version"] == 3
    with pytest.raises(ResultError, match="schema version 1, which this Octavo cannot read any more"):
        migrated(Stored({"schema_version": 1}, [], [], []), {2: rename("b", "c")}, where=Path("x"), to=3, header=lambda one: one.header)


def test_a_run_of_an_older_version_is_still_complete(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the schema moved on: it is found, and loaded through the migration."""

    def more(stored: Stored) -> Stored:
        return replace(stored, header=stored.header | {"settings": stored.header["settings"] | {"migrated": True}})

    monkeypatch.setattr(runs, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    monkeypatch.setitem(runs.MIGRATIONS, SCHEMA_VERSION, more)
    assert is_complete(saved) and Run.load(saved).settings["migrated"]


def test_a_run_is_replaced_whole_and_other_things_are_left_alone(saved: Path, tmp_path: Path) -> None:
    """An interrupted run gives way to the whole one; a folder of something else is not touched, and no scraps are left."""
    first = Run.load(saved)
    replace(first, complete=False, records=first.records[:3]).save(saved)
    assert len(Run.load(saved).records) == 3 and not is_complete(saved)
    first.save(saved)
    assert is_complete(saved) and [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ResultError, match="holds something that is no run"):
        first.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    first.save(tmp_path / "empty")
    assert is_complete(tmp_path / "empty")


def cut_off(monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
    """The process is killed at this rename of a save, the first being 0."""
    real, calls = os.replace, list[object]()

    def rename(*args: Any) -> None:
        if len(calls) == at:
            raise KeyboardInterrupt
        calls.append(args)
        real(*args)

    monkeypatch.setattr(os, "replace", rename)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("reader", ["load", "complete", "save", "figures", "report"])
def test_a_save_that_is_cut_off_loses_nothing(reader: str, at: int, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its two renames there is no folder of that name; whoever reads or saves next finds the new one, with all its files."""
    run = Run.load(saved)
    run.identity, run.settings = replace(IDENTITY, pool_slots=run.account.capacity), {"model": "m"}
    run.save(saved, beside={"metrics.json": "{}"})
    before = replace(run, stopped_by="later")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_off(patch, at=at)
        before.save(saved, beside={"metrics.json": '{"new": 1}'})
    assert saved.exists() == (at == 0)
    if reader == "complete":
        assert is_complete(saved)
    elif reader == "save":
        with pytest.raises(TypeError):
            replace(run, arguments={"x": object()}).save(saved)  # which fails, and has not taken the only one away
    elif reader == "figures":
        assert read_figures(saved.parent).cells["run"].workloads == [run.work.digest]
        assert read_figures(saved) == read_figures(saved.parent)
    elif reader == "report":
        assert main(["bench", "report", str(saved), "--no-plots"]) == 0
    back = Run.load(saved)
    assert (back.stopped_by, back.records) == ("later" if at else "", run.records)
    assert (saved / "metrics.json").read_text() == ('{"new": 1}' if at else "{}")
    assert [path.name for path in saved.parent.iterdir()] == ["run"]


def test_what_a_cut_off_save_left_is_no_repeat(saved: Path) -> None:
    """A part that was half written has no place among the runs of a folder."""
    run = Run.load(saved)
    run.identity, run.settings = replace(IDENTITY, pool_slots=run.account.capacity), {"model": "m"}
    run.save(saved)
    shutil.copytree(saved, saved.with_name(".other.part"))
    assert len(read_figures(saved.parent).cells["run"].workloads) == 1


def test_a_folder_by_another_name(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that one stands in, and a link to it."""
    run = Run.load(saved)
    saved.with_name("link").symlink_to(saved)
    monkeypatch.chdir(saved)
    for number, name in enumerate((".", "../link")):
        replace(run, stopped_by=str(number)).save(name)
        monkeypatch.chdir(saved)
        assert Run.load(name).stopped_by == Run.load(saved).stopped_by == str(number)
    assert saved.with_name("link").is_symlink()


def test_only_a_whole_run_is_complete(saved: Path, tmp_path: Path) -> None:
    """What `--resume` need not do again."""
    assert is_complete(saved)
    assert not is_complete(tmp_path / "nothing") and not is_complete(tmp_path)
    (saved / HEADER).write_text("[]")
    assert not is_complete(saved)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda run: [path.unlink() for path in run.iterdir()] and run.rmdir(), "no saved run: it has no run.json"),
    "no header": (lambda run: (run / HEADER).unlink(), "no saved run: it has no run.json"),
    "half a header": (lambda run: (run / HEADER).write_text((run / HEADER).read_text()[:200]), "run.json cannot be read"),
    "another header": (lambda run: (run / HEADER).write_text('{"a": 1}'), "has no schema_version"),
    "a newer version": (lambda run: edit(run, schema_version=99), "schema version 99, this Octavo reads up to 3: update Octavo"),
    "no steps": (lambda run: (run / STEPS).unlink(), "steps.jsonl cannot be read"),
    "a lost tail": (lambda run: cut(run / STEPS, 5), "steps.jsonl has 5 lines, run.json says"),
    "half a line": (lambda run: (run / REQUESTS).write_text((run / REQUESTS).read_text()[:-20]), "requests.jsonl, line 12, is damaged"),
    "a wrong type": (lambda run: swap(run / REQUESTS, '"sent":', '"sent":"late","x":'), "requests.jsonl, line 1, is damaged: sent"),
    "a missing field": (lambda run: swap(run / STEPS, '"num_rows":', '"rows":'), "steps.jsonl, line 1, is damaged: num_rows"),
    "an item of nothing": (lambda run: swap(run / WORK, '"output_len":1', '"output_len":0'), "work.jsonl, line 1, is damaged"),
    "a header without load": (lambda run: edit(run, settings=None, work={}), "run.json is damaged: KeyError 'name'"),
    "a strange identity": (lambda run: edit(run, identity={"date": 3}), "run.json is damaged: versions"),
}


def edit(run: Path, **changes: object) -> None:
    (run / HEADER).write_text(json.dumps(json.loads((run / HEADER).read_text()) | changes))


def cut(path: Path, lines: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


def swap(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_said_and_where(name: str, saved: Path) -> None:
    """As an error of ours, for which a command exits with 2."""
    damage, words = DAMAGES[name]
    damage(saved)
    with pytest.raises(ResultError) as error:
        Run.load(saved)
    assert words in str(error.value) and saved.name in str(error.value)
    assert isinstance(error.value, ConfigError)


def test_times_keep_all_their_digits(tmp_path: Path) -> None:
    """A figure that is computed from a saved run is the one that was printed."""
    run = timed("paged", "static")
    odd = float(np.nextafter(1.0, 2.0))
    run.records[0].sent = odd
    run.save(tmp_path / "run")
    assert Run.load(tmp_path / "run").records[0].sent == odd
