"""What a registry refuses to take: descriptors that would only fail later, far from their author."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ConfigDict

from octavo.core.descriptors import Descriptor
from octavo.core.errors import PluginContractError
from octavo.core.options import PluginOptions, SchedulerOptions
from octavo.core.registry import Registry
from octavo.core.testing.fake_plugins import fake_allocator, fake_kernel, fake_model, fake_ops, fake_scheduler


class Loose(PluginOptions):
    model_config = ConfigDict(extra="ignore")


class NamedPlugin(PluginOptions):
    plugin: str = ""


class Required(PluginOptions):
    size: int


@pytest.mark.parametrize(
    ("descriptor", "text"),
    [
        (fake_kernel(options=Loose), "kernel 'naive': options must keep extra='forbid' and frozen=True"),
        (fake_kernel(options=NamedPlugin), "kernel 'naive': an option cannot be called 'plugin', the config uses that name"),
        (
            fake_kernel(options=Required),
            "kernel 'naive': option 'size' needs a default, so that the plugin can run and be compared as it comes",
        ),
        (
            fake_scheduler(options=PluginOptions),
            f"scheduler 'continuous': options must be a class derived from octavo.core.options.SchedulerOptions, not {PluginOptions!r}",
        ),
        (fake_kernel(provides={"paged_kv"}), "kernel 'naive': provides must be a frozenset of capabilities, not {'paged_kv'}"),
        (
            fake_kernel(provides=frozenset({"windows"})),
            "kernel 'naive' provides an unknown capability 'windows' (did you mean window?): known are contiguous_kv, paged_kv, window, "
            "softcap, sinks, weights:*, device:*, dtype:*, kv_dtype:*; a word of your own needs a dot, like 'mycorp.windows'",
        ),
        (fake_kernel(provides=frozenset({"device:cuda"})), "kernel 'naive' provides device:cuda, which only facts can provide"),
        (fake_allocator(provides=frozenset({"window"})), "allocator 'paged' provides window, which only kernel can provide"),
    ],
)
def test_unsound_descriptors_are_refused(descriptor: Descriptor, text: str) -> None:
    """The error names the plugin, what is wrong, and what would be right."""
    with pytest.raises(PluginContractError) as error:
        Registry().add(descriptor)
    assert str(error.value) == text


def test_unknown_layout_is_refused() -> None:
    """An allocator can only have a layout that kernels know."""
    with pytest.raises(PluginContractError) as error:
        fake_allocator("x", layout="tree")
    assert str(error.value) == "allocator 'x': layout must be one of region, block_table, not 'tree'"


def test_words_with_a_dot_are_a_third_partys_own() -> None:
    """A capability that Octavo does not define is allowed where its name cannot be a typo."""
    registry = Registry()
    registry.add(fake_kernel(provides=frozenset({"paged_kv", "mycorp.compressed_kv"})))
    assert registry.names("kernel") == ["naive"]


def test_one_name_in_two_kinds_is_no_duplicate() -> None:
    """Names are unique within a kind only."""
    registry = Registry()
    for descriptor in (fake_scheduler("x"), fake_allocator("x"), fake_kernel("x"), fake_ops("x"), fake_model("x")):
        registry.add(descriptor)
    assert registry.problems() == []
    assert registry.get("ops", "x").kind == "ops"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"max_num_seqs": "8"},
        {"ageing": float("nan")},
        {"ageing": 0.0},
        {"order": "lifo"},
        {"classes": {"batch": {"max_running": 0}}},
        {"classes": {"batch": {"max_runing": 1}}},
        {"max_num_batched_tokens": 1.5},
    ],
)
def test_scheduler_options_are_strict(wrong: dict[str, Any]) -> None:
    """Wrong types, values out of range and unknown names never get through."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SchedulerOptions.model_validate(wrong)
