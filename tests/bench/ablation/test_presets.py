"""The ablations that come with Octavo: all can be read, make sense, and have work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.bench.ablation.cells import make_cells
from octavo.bench.ablation.engines import Engines
from octavo.bench.ablation.measures import find_measure
from octavo.bench.ablation.presets import find_spec, preset_names
from octavo.bench.ablation.works import scenario_work
from octavo.bench.drive import drive
from octavo.bench.step_log import StepLog
from octavo.core.errors import InvalidOptionsError
from octavo.core.registry import Registry
from octavo.core.settings.layers import merge
from tests.models import VOCAB, tiny


@pytest.mark.parametrize("name", preset_names())
def test_a_preset(name: str) -> None:
    """Every cell differs from its parent by one part, every measure exists, and every scenario's work is made and fits the context."""
    spec, registry = find_spec(name), Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
    assert spec.name == name and spec.summary and spec.repeats >= 5 and len(spec.baselines) == 1
    for measure in (*spec.compared, *(claim.measure for claim in spec.claims)):
        find_measure(measure)
    for scenario, given in spec.scenarios.items():
        cells = make_cells(registry, spec, scenario)
        length = cells[0].config.engine.max_model_len or 0
        work = scenario_work(given, scenario, seed=0, vocab_size=49152, max_model_len=length)
        assert len(work.items) == given.workload.count
        classes = {item.class_name for item in work.items}
        assert {find_measure(measure).class_name for measure in spec.compared} <= {None, *classes}
        lengths = [work.prompt_len(index) + item.output_len for index, item in enumerate(work.items)]
        assert max(lengths) <= length <= (cells[0].config.engine.num_kv_slots or 0)


def test_the_names() -> None:
    """Those that the documentation speaks of."""
    issue = {"quick", "steps", "block-size", "prefix-share", "chunk-budget", "rerank", "isolation", "kernels"}
    assert issue | {"continuous-batching", "paging", "chunked-prefill", "regression"} == set(preset_names())


def test_quick_has_four_cells_and_five_seeds() -> None:
    """Small enough for a demo."""
    spec = find_spec("quick")
    assert (len(spec.cells), spec.repeats, len(spec.scenarios)) == (4, 5, 1)


def test_prefix_shares_are_what_they_are_called() -> None:
    """Of all tokens of the prompts, those that stood in whole blocks of 16 of an earlier one; the last token is always computed."""
    spec = find_spec("prefix-share")
    for name, share in {"none": 0.0, "quarter": 0.25, "half": 0.5, "three-quarters": 0.75}.items():
        work = scenario_work(spec.scenarios[name], name, seed=3, vocab_size=49152, max_model_len=288)
        seen: set[tuple[int, ...]] = set()
        cached = 0
        for item in work.items:
            blocks = [item.prompt[: end + 16] for end in range(0, len(item.prompt), 16)]
            cached += 16 * sum(block in seen and len(block) < len(item.prompt) for block in blocks)
            seen.update(blocks)
        assert cached == share * sum(len(item.prompt) for item in work.items), name


@pytest.mark.parametrize("scenario, running, waiting, blocks, empty", [("point-wise", 64, 36, 192, 512), ("list-wise", 1, 0, 102, 8)])
def test_reranking_queues_for_seats(scenario: str, running: int, waiting: int, blocks: int, empty: int) -> None:
    """B7, at max_num_seqs 64: of 100 requests 64 run and 36 wait, 8 slots of each one's last block empty. Or one runs, and none waits."""
    spec, registry = find_spec("rerank"), Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
    settings = merge(spec.settings, {"engine": {"device": "cpu"}})
    spec = spec.model_copy(update={"model": str(tiny("llama_gqa", max_position_embeddings=2048)), "settings": settings})
    paged = make_cells(registry, spec, scenario)[0]
    work = scenario_work(spec.scenarios[scenario], scenario, seed=0, vocab_size=VOCAB, max_model_len=2048)
    ranked = replace(work, items=[item for item in work.items if item.class_name == "rerank"])
    with Engines(registry).open(paged.config) as built:
        log = StepLog(built.engine.clock.now())
        with log.watching(built.engine):
            drive(built.engine, ranked)
        first = log.lines[0]
        assert (first.num_running, first.num_waiting) == (running, waiting)
        usage = first.usage
        assert ((usage.filled + usage.held) / built.pool.block_size, usage.held) == (blocks, empty)


@pytest.mark.parametrize("name, control", [("rerank", "bystanders-alone"), ("isolation", "chats-alone")])
def test_the_control_has_the_same_chats(name: str, control: str) -> None:
    """At the same times, and beside them nothing but a request of two tokens, before any of them."""
    spec = find_spec(name)
    chats = {}
    for scenario, given in spec.scenarios.items():
        work = scenario_work(given, scenario, seed=5, vocab_size=49152, max_model_len=2048)
        chats[scenario] = [item for item in work.items if item.class_name == "chat"]
        if scenario == control:
            first, *others = work.items
            assert (len(first.prompt), first.output_len, others) == (2, 1, chats[scenario])
    assert len(chats) > 1 and all(found == chats[control] for found in chats.values()) and len(chats[control]) == 8


def test_every_kernel_is_compared() -> None:
    """Each built-in one has a cell, and those that do not run everywhere may be left out."""
    spec, registry = find_spec("kernels"), Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
    assert set(spec.cells) == set(registry.names("kernel"))
    assert {name for name, cell in spec.cells.items() if cell.optional} == {"cpu_paged", "triton_paged"}


def test_a_name_that_is_none() -> None:
    """The nearest one is named, and that a file would do."""
    with pytest.raises(
        InvalidOptionsError, match=r"no ablation is called 'quik' \(did you mean quick\?\): name a .toml file, or one of block-"
    ):
        find_spec("quik")
    with pytest.raises(InvalidOptionsError, match=r"ablation file quik\.toml cannot be read"):
        find_spec("quik.toml")
