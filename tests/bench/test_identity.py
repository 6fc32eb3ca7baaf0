"""An identity says what a result depends on, and changes when that does."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import octavo
from octavo.bench.identity import identify
from octavo.core import description
from octavo.core.description import weights_revision
from octavo.core.stack import Stack
from tests.bench.measured import some_work
from tests.bench.test_self_checks import STACKS
from tests.matrix.stacks import build, source_of
from tests.models import tiny


def stack(scheduler: str = "chunked", allocator: str = "prefix") -> Stack:
    return next(s for s in STACKS if (s.scheduler.name, s.allocator.name, s.kernel.name) == (scheduler, allocator, "sdpa"))


def test_what_a_result_depends_on() -> None:
    """Versions, model, types, stack with all options, pool, work and machine; no text, no path of this checkout, no time but one."""
    built, work = build(tiny("llama_gqa"), stack(), max_num_seqs=4, max_model_len=64, num_kv_slots=512), some_work()
    found = identify(built, work)
    assert found.versions["octavo"] == octavo.__version__ and found.versions["torch"] and found.versions["python"].startswith("3.")
    assert (found.dtype, found.kv_dtype, found.max_model_len, found.pool_slots) == ("float32", "float32", 64, 512)
    assert found.pool_bytes == built.pool.num_bytes
    assert found.stack["allocator"] == "prefix" and found.options["scheduler"]["max_num_seqs"] == 4
    assert (found.workload, found.workload_seed, found.workload_hash) == ("some", 3, work.digest)
    assert found.device == "cpu" and found.driver == "" and found.cpu and found.cores and found.threads and found.memory
    assert str(Path.cwd()) not in str(asdict(found))
    again = identify(built, work)
    assert replace(again, date="") == replace(found, date="")
    built.engine.close()


def test_hashes_change_with_what_they_are_of() -> None:
    """Another option, another plugin, another pool: another config. The same again: the same."""
    work = some_work()

    def config_hash(chosen: Stack, **options: int) -> str:
        built = build(tiny("llama_gqa"), chosen, **({"max_num_seqs": 4, "max_model_len": 64, "num_kv_slots": 512} | options))
        built.engine.close()
        return identify(built, work).config_hash

    first = config_hash(stack())
    assert first == config_hash(stack())
    others = [
        config_hash(stack(), max_num_seqs=3),
        config_hash(stack("static")),
        config_hash(stack(allocator="paged")),
        config_hash(stack(), num_kv_slots=256),
        config_hash(stack(), max_model_len=48),
    ]
    assert len({first, *others}) == 6


def test_weights_are_told_apart(tmp_path: Path) -> None:
    """By the source's own revision, or by their bytes, which may lie anywhere."""
    source = source_of(tiny("llama_gqa"))
    assert weights_revision(replace(source, revision="abc123")) == "abc123"
    found = weights_revision(source)
    assert found.startswith("sha256:") and len(found) == 7 + 64
    shutil.copytree(source.path, tmp_path / "copy")
    copy = replace(source, path=tmp_path / "copy")
    assert weights_revision(copy) == found
    file = next((tmp_path / "copy").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_revision(copy) != found


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has no version, and is no error."""
    monkeypatch.setattr(description, "PACKAGES", ("octavo", "no-such-package"))
    description.versions.cache_clear()
    try:
        assert description.versions()["no-such-package"] == ""
    finally:
        description.versions.cache_clear()
