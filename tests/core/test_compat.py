"""Which stacks run, why others don't, and what would mend them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.compat import all_stacks, markdown_table, problems, raise_if_incompatible, reports, single_changes
from octavo.core.descriptors import Descriptor, Facts
from octavo.core.errors import IncompatibleStackError, PluginContractError
from octavo.core.registry import Registry
from octavo.core.stack import Choice, Stack
from octavo.core.testing.fake_plugins import (
    TINY_CONFIG,
    fake_allocator,
    fake_kernel,
    fake_model,
    fake_ops,
    fake_scheduler,
    fake_shape,
)

PAGED_ONLY = frozenset({"paged_kv"})
BOTH = frozenset({"paged_kv", "contiguous_kv"})


def registry_of(*plugins: Descriptor) -> Registry:
    registry = Registry()
    for plugin in plugins:
        registry.add(plugin)
    return registry


def stack_of(**parts: Descriptor) -> Stack:
    defaults = {
        "scheduler": fake_scheduler(),
        "allocator": fake_allocator(),
        "kernel": fake_kernel(),
        "ops": fake_ops(),
        "model": fake_model(),
    }
    return Stack(**{kind: Choice.default(plugin) for kind, plugin in {**defaults, **parts}.items()})


def facts(device: str = "cpu", dtype: str = "float32", **shape: Any) -> Facts:
    return fake_shape(**shape).facts(device=device, dtype=dtype, kv_dtype=dtype)


def test_facts_of_a_shape() -> None:
    """Windows once each, the GQA ratio, and the device's type are derived."""
    found = fake_shape(windows=(None, 8, 8), softcap=50.0).facts(device="cuda:1", dtype="bfloat16", kv_dtype="float16")
    assert found.windows == {8}
    assert found.gqa_ratio == 2
    assert found.needs == {"window", "softcap"}
    assert found.provides == {"device:cuda", "dtype:bfloat16", "kv_dtype:float16"}


def test_the_designed_text() -> None:
    """Problem, both culprits and the single changes, to the letter."""
    contiguous, paged = fake_allocator("contiguous", layout="region"), fake_allocator("paged")
    picky, naive = fake_kernel("x", provides=PAGED_ONLY), fake_kernel("naive", provides=BOTH)
    registry = registry_of(contiguous, paged, picky, naive, fake_scheduler(), fake_ops(), fake_model())
    with pytest.raises(IncompatibleStackError) as error:
        raise_if_incompatible(stack_of(allocator=contiguous, kernel=picky), facts(), registry)
    assert str(error.value) == (
        "This stack cannot run:\n"
        "  - allocator 'contiguous' needs contiguous_kv, which kernel 'x' does not provide\n"
        '  One change that would make it run: allocator = "paged", or kernel = "naive"'
    )


def test_a_stack_that_runs_has_no_problems() -> None:
    """Nothing is needed that isn't there."""
    stack = stack_of()
    assert problems(stack, facts()) == []
    raise_if_incompatible(stack, facts(), Registry())


def test_all_problems_at_once_and_no_single_change() -> None:
    """Needs of every part, of device, types and model, and every refusal are in one report."""
    kernel = fake_kernel(
        "x",
        provides=PAGED_ONLY,
        needs=lambda options, facts: {"device:cuda", "dtype:bfloat16", "mycorp.magic"},
        rejects=lambda options, facts: ["head size 16 is not one of 64, 128"] if facts.head_size_k == 16 else [],
    )
    stack = stack_of(allocator=fake_allocator("contiguous", layout="region"), kernel=kernel)
    with pytest.raises(IncompatibleStackError) as error:
        raise_if_incompatible(stack, facts(windows=(8, None)), Registry())
    assert str(error.value) == (
        "This stack cannot run:\n"
        "  - allocator 'contiguous' needs contiguous_kv, which kernel 'x' does not provide\n"
        "  - kernel 'x' needs device:cuda, but device is cpu\n"
        "  - kernel 'x' needs dtype:bfloat16, but dtype is float32\n"
        "  - kernel 'x' needs mycorp.magic, which no other part provides\n"
        "  - kernel 'x': head size 16 is not one of 64, 128\n"
        "  - model 'llama' needs window, which kernel 'x' does not provide\n"
        "  No single change would make it run."
    )


def test_three_changes_are_listed_and_each_mends_the_stack() -> None:
    """What is promised as a mend is one: every change makes the whole stack run, and an incompatible one isn't named."""
    contiguous, picky = fake_allocator("contiguous", layout="region"), fake_kernel("x", provides=PAGED_ONLY)
    useless = fake_kernel("gpu", provides=BOTH, needs=lambda options, facts: {"device:cuda"})
    registry = registry_of(contiguous, picky, useless, fake_kernel("a"), fake_kernel("b"), fake_allocator(), fake_scheduler(), fake_ops())
    stack = stack_of(allocator=contiguous, kernel=picky)
    changes = single_changes(stack, facts(), registry)
    assert [(change.kind, change.name) for change in changes] == [("allocator", "paged"), ("kernel", "a"), ("kernel", "b")]
    assert all(not problems(stack.with_part(change), facts()) for change in changes)
    with pytest.raises(IncompatibleStackError, match=r'run: allocator = "paged", kernel = "a", or kernel = "b"$'):
        raise_if_incompatible(stack, facts(), registry)


def test_a_part_does_not_satisfy_itself() -> None:
    """What a part provides counts for the others only."""
    kernel = fake_kernel(provides=BOTH | {"mycorp.x"}, needs=lambda options, facts: {"mycorp.x"})
    assert problems(stack_of(kernel=kernel), facts()) == ["kernel 'naive' needs mycorp.x, which no other part provides"]
    assert problems(stack_of(kernel=kernel, ops=fake_ops(provides=frozenset({"mycorp.x"}))), facts()) == []


def test_a_misspelt_need_is_the_plugins_fault() -> None:
    """A word nobody knows could never be provided: an error, not an incompatible stack."""
    kernel = fake_kernel(needs=lambda options, facts: {"sink"})
    with pytest.raises(PluginContractError, match=r"^kernel 'naive' needs an unknown capability 'sink' \(did you mean sinks\?\)"):
        problems(stack_of(kernel=kernel), facts())


def test_every_combination_is_judged_once() -> None:
    """All stacks of the model plugins that accept the model, each with a verdict; the table has a line for each."""
    registry = registry_of(
        fake_scheduler("continuous"),
        fake_scheduler("static"),
        fake_allocator("paged"),
        fake_allocator("contiguous", layout="region"),
        fake_kernel("naive", provides=BOTH),
        fake_kernel("x", provides=PAGED_ONLY),
        fake_ops(),
        fake_model("llama"),
        fake_model("other", architecture="Other"),
    )
    assert len({str(stack) for stack in all_stacks(registry, TINY_CONFIG)}) == 8
    rows = list(reports(registry, TINY_CONFIG, device="cpu", dtype="float32", kv_dtype="float32"))
    broken = {str(row.stack) for row in rows if not row.runs}
    assert broken == {f"{scheduler} + contiguous + x + torch + llama" for scheduler in ("continuous", "static")}
    table = markdown_table(rows).splitlines()
    assert len(table) == 2 + 8
    reason = "allocator 'contiguous' needs contiguous_kv, which kernel 'x' does not provide"
    assert f"| `continuous` | `contiguous` | `x` | `torch` | `llama` | no | {reason} |" in table
    assert "| `continuous` | `paged` | `x` | `torch` | `llama` | yes |  |" in table
