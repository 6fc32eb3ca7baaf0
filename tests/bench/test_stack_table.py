"""The table of stacks: every installed one has a row with its figures or the reason why it has none."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.bench.stack_table import TIE, Reference, Row, compare_stacks, installed_stacks, reference_tokens
from octavo.core.assembly import LoadedModel, load_model
from octavo.core.registry import Registry
from octavo.core.settings.config import EngineConfig, load_config
from octavo.core.testing.fake_plugins import fake_kernel
from tests.models import PROMPTS, reference_tokens as tokens_of, tiny

LENGTHS = [4, 9, 1, 6, 3, 12]


BUILT_INS = {
    "model": ["llama"],
    "scheduler": ["continuous", "static"],
    "allocator": ["contiguous", "paged"],
    "kernel": ["naive", "sdpa"],
    "ops": ["torch"],
}


def registry(*extra: Any) -> Registry:
    """Those built-ins, whatever others there are, and `extra`: eight stacks that run."""
    installed, found = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"}), Registry()
    for plugin in [*(installed.get(kind, name) for kind, names in BUILT_INS.items() for name in names), *extra]:
        found.add(plugin)
    return found


def config(plugins: Registry, **sections: Any) -> EngineConfig:
    engine = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "num_kv_slots": 256}
    settings: dict[str, Any] = {
        "model": {"source": str(tiny("llama_gqa"))},
        "scheduler": {"plugin": "continuous", "max_num_seqs": 4},
        "allocator": {"plugin": "paged"},
        "engine": engine,
    }
    return load_config(plugins, environ={}, overrides={**settings, **sections})


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(registry(), config(registry()))


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[Reference]:
    return list(reference_tokens(loaded, PROMPTS, LENGTHS))


def compare(plugins: Registry, loaded: LoadedModel, expected: list[Reference], **sections: Any) -> dict[str, Row]:
    rows = compare_stacks(plugins, config(plugins, **sections), loaded, prompts=PROMPTS, lengths=LENGTHS, expected=expected)
    return {str(row.stack.stack): row for row in rows}


def test_the_reference_is_greedy_transformers(loaded: LoadedModel, expected: list[Reference], capfd: pytest.CaptureFixture[str]) -> None:
    """As many tokens as asked for, past an EOS too, with the lead of each over the next best; no bars of transformers' own."""
    for length, made, whole in zip(LENGTHS, expected, tokens_of(tiny("llama_gqa"), PROMPTS, 12), strict=True):
        assert tuple(made.token_ids) == whole[:length]
        assert len(made.gaps) == length and min(made.gaps) > 1e-3
    ending = tiny("llama_gqa", eos_token_id=[expected[1].token_ids[2]])
    capfd.readouterr()
    plugins = registry()
    with_eos = load_model(plugins, config(plugins, model={"source": str(ending)}))
    assert list(reference_tokens(with_eos, PROMPTS[1:2], [9])) == expected[1:2]
    assert capfd.readouterr().err == ""


def test_every_stack_has_a_row(loaded: LoadedModel, expected: list[Reference]) -> None:
    """All run, with equal pools and limits, and give the same tokens (fault 48)."""
    rows = compare(registry(), loaded, expected)
    assert list(rows) == [str(report.stack) for report in installed_stacks(registry(), loaded)]
    assert len(rows) == 8
    for name, row in rows.items():
        assert (row.problem, row.failed, row.same, row.ties, row.of) == ("", False, 6, 0, 6), name
        assert row.totals is not None and row.tokens_per_second > 0
        assert 0 < row.totals.peak_slots <= 256
    continuous, static = (rows[f"{scheduler} + paged + naive + torch + llama"].totals for scheduler in ("continuous", "static"))
    assert continuous is not None and static is not None
    # Four at once, long prompts first: static runs (12, 3, 6, 1) and then (9, 4), each up to its longest.
    assert (continuous.steps, continuous.idle_rows) == (12, 0)
    assert (static.steps, static.idle_rows) == (12 + 9, (4 * 12 - 22) + (2 * 9 - 13))


def test_configured_options_count_for_configured_plugins(loaded: LoadedModel, expected: list[Reference]) -> None:
    """Others have their defaults: the paged rows show the block size, with the default of 16 they hold more."""
    plugins = registry()
    small = compare(plugins, loaded, expected, allocator={"plugin": "paged", "block_size": 1})
    usual = compare(plugins, loaded, expected)
    name, other = "continuous + paged + naive + torch + llama", "continuous + contiguous + naive + torch + llama"
    assert small[name].totals.peak_slots < usual[name].totals.peak_slots
    assert (small[other].totals.steps, small[other].totals.peak_slots) == (usual[other].totals.steps, usual[other].totals.peak_slots)


def test_stacks_without_figures_say_why(loaded: LoadedModel, expected: list[Reference]) -> None:
    """One that cannot run here: reason and mend. One that breaks: what was raised, and it counts as failed. The others run on."""

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    plugins = registry(fake_kernel("gpu_only", needs=lambda options, facts: {"device:cuda"}))
    plugins.add(type(fake_kernel())(name="broken", summary="", build=broken, provides=frozenset({"contiguous_kv", "paged_kv"})))
    rows = compare(plugins, loaded, expected)
    assert len(rows) == 16
    refused = rows["static + paged + gpu_only + torch + llama"]
    assert (refused.problem, refused.failed) == ("kernel 'gpu_only' needs device:cuda, but device is cpu", False)
    assert {change.name for change in refused.stack.changes} == {"naive", "sdpa", "broken"}
    failed = rows["static + paged + broken + torch + llama"]
    assert (failed.problem, failed.failed) == (
        "PluginContractError: kernel 'broken' could not be built: ZeroDivisionError: division by zero",
        True,
    )
    assert sum(row.same == 6 for row in rows.values()) == 8


def test_a_pool_that_is_too_small_is_no_failure(loaded: LoadedModel, expected: list[Reference]) -> None:
    """A setting that one stack cannot use is its reason."""
    plugins = registry()
    rows = compare(plugins, loaded, expected, engine={"device": "cpu", "dtype": "float32", "max_model_len": 65, "num_kv_slots": 66})
    paged, contiguous = rows["static + paged + sdpa + torch + llama"], rows["static + contiguous + sdpa + torch + llama"]
    assert "has 64 slots" in paged.problem and not paged.failed
    assert contiguous.same == 6


def test_a_difference_is_a_difference_unless_it_was_a_tie(loaded: LoadedModel, expected: list[Reference]) -> None:
    """Where transformers' two best were nearer than TIE, another token is accepted and counted; elsewhere never."""
    changed = [Reference([*one.token_ids[:-1], (one.token_ids[-1] + 1) % 384], list(one.gaps)) for one in expected]
    changed[0].gaps[-1] = TIE / 2
    changed[3].gaps[-1] = TIE / 2
    changed[1].gaps[0] = TIE / 2  # not where they differ
    for row in compare(registry(), loaded, changed).values():
        assert (row.same, row.ties, row.of) == (2, 2, 6)
