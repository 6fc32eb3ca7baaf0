"""Cells: each differs from its parent by one part, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.bench.ablation.cells import Cell, make_cells, parse_stack, stack_spec
from octavo.bench.ablation.spec import AblationSpec
from octavo.core.errors import InvalidOptionsError
from octavo.core.registry import Registry


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})


ENGINE = {"max_model_len": 128, "num_kv_slots": 256}


def spec(cells: dict[str, Any], **settings: Any) -> AblationSpec:
    return AblationSpec.model_validate(
        {"name": "x", "settings": {"engine": ENGINE, **settings}, "scenarios": {"a": {"workload": {"kind": "random"}}}, "cells": cells}
    )


def made(registry: Registry, cells: dict[str, Any], **settings: Any) -> dict[str, Cell]:
    return {cell.name: cell for cell in make_cells(registry, spec(cells, **settings), "a")}


def test_a_ladder(registry: Registry) -> None:
    """From a preset, one plugin at a time; what is common stays, the shared limits too, and the old plugin's options go."""
    cells = made(
        registry,
        {
            "fastertransformer": {"preset": "fastertransformer"},
            "orca": {"parent": "fastertransformer", "settings": {"scheduler": {"plugin": "continuous"}}},
            "paged": {"parent": "orca", "settings": {"allocator": {"plugin": "paged", "block_size": 8}}},
            "small": {"parent": "paged", "settings": {"allocator": {"block_size": 4}}},
        },
        scheduler={"max_num_seqs": 7},
        kernel={"plugin": "sdpa"},
    )
    assert [cell.change for cell in cells.values()] == [
        "",
        "scheduler: static -> continuous",
        "allocator: contiguous -> paged(block_size=8)",
        "allocator: paged(block_size=8) -> paged(block_size=4)",
    ]
    for cell in cells.values():
        assert cell.config.scheduler.options.max_num_seqs == 7  # type: ignore[attr-defined]
        assert cell.config.kernel is not None and cell.config.kernel.name == "sdpa"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "cells.b: it is the same as its parent 'a'; change one part of it"),
        (
            {"scheduler": {"plugin": "continuous"}, "allocator": {"plugin": "paged"}},
            r"b: it differs from its parent 'a' in 2 parts \(scheduler: static -> continuous; allocator: contiguous -> paged\), and",
        ),
        ({"scheduler": {"plugin": "continuous", "max_num_seqs": 3}}, "in 2 parts .*scheduler.max_num_seqs: 256 -> 3"),
        ({"kernel": {"plugin": "sdpa"}, "engine": {"dtype": "float32"}}, "in 2 parts .*engine.dtype: 'auto' -> 'float32'"),
        ({"engine": {"num_kv_slots": 512}}, "cells.b: it is the same as its parent"),
        ({"kernel": {"plugin": "sdpa"}, "engine": {"num_kv_slots": 512}}, "cells.b: engine.num_kv_slots is 512, but 256 in 'a'"),
        ({"kernel": {"plugin": "sdpa"}, "model": {"source": "other"}}, "cells.b: model.source is 'other'"),
        ({"allocator": {"plugin": "paged", "blok_size": 8}}, r"cells.b: allocator.paged.blok_size: Extra inputs are not permitted \(did"),
    ],
)
def test_other_than_one_part(registry: Registry, settings: dict[str, Any], expected: str) -> None:
    """Refused, with all that differs; and what must not differ at all."""
    with pytest.raises(InvalidOptionsError, match=expected):
        made(registry, {"a": {"preset": "fastertransformer"}, "b": {"parent": "a", "settings": settings}})


def test_the_pool_must_be_given(registry: Registry) -> None:
    """Its default depends on the memory that is free when a cell starts."""
    with pytest.raises(InvalidOptionsError, match="set num_kv_slots or kv_cache_memory"):
        made(registry, {"a": {}}, engine={"max_model_len": 128, "num_kv_slots": None})


def test_settings_of_a_scenario(registry: Registry) -> None:
    """Hold for all cells in it, over the common ones."""
    given = spec({"a": {"preset": "orca"}, "b": {"parent": "a", "settings": {"allocator": "paged"}}}).model_dump()
    given["scenarios"]["large"] = {**given["scenarios"]["a"], "settings": {"engine": {"num_kv_slots": 1024}}}
    cells = make_cells(registry, AblationSpec.model_validate(given), "large")
    assert [cell.config.engine.num_kv_slots for cell in cells] == [1024, 1024]


def test_the_environment_is_not_read(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved specification says all."""
    monkeypatch.setenv("OCTAVO_SET_ENGINE__NUM_KV_SLOTS", "999")
    assert made(registry, {"a": {}})["a"].config.engine.num_kv_slots == 256


def test_stacks_as_text(registry: Registry) -> None:
    """As `octavo stacks` writes them, with options where wanted, or a preset."""
    assert parse_stack("static + contiguous(reservation = pow2) + sdpa + torch + llama") == {
        "scheduler": {"plugin": "static"},
        "allocator": {"plugin": "contiguous", "reservation": "pow2"},
        "kernel": {"plugin": "sdpa"},
        "ops": {"plugin": "torch"},
        "model": {"plugin": "llama"},
    }
    assert parse_stack("chunked(max_num_batched_tokens=256, mixing=mixed)+paged")["scheduler"] == {
        "plugin": "chunked",
        "max_num_batched_tokens": 256,
        "mixing": "mixed",
    }
    cells = made(registry, {name: cell.model_dump() for name, cell in stack_spec("orca", "continuous + paged").items()})
    assert cells["candidate"].change == "allocator: contiguous -> paged"
    with pytest.raises(InvalidOptionsError, match="in 2 parts"):
        made(registry, {name: cell.model_dump() for name, cell in stack_spec("orca", "vllm").items()})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("orka", r"'orka' is no stack: write a preset's name .* \(did you mean orca\?\)"),
        ("a + b + c + d + e + f", "is no stack"),
        ("static + paged(block_size", r"'paged\(block_size' in the stack .* is no plugin"),
        ("static + paged(16)", "'16' in the stack .* is no option: write OPTION = VALUE"),
    ],
)
def test_texts_that_are_no_stack(text: str, expected: str) -> None:
    """Told how to write one."""
    with pytest.raises(InvalidOptionsError, match=expected):
        parse_stack(text)
