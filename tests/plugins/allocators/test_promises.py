"""What every allocator promises, whatever its layout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from octavo.core.errors import PluginContractError
from octavo.core.kv import Allocator
from octavo.core.request import Sequence
from octavo.plugins.allocators import contiguous, paged, prefix
from tests.plugins.allocators.memory import ALLOCATORS, Memory, fork, request, start, tags


@pytest.fixture(params=ALLOCATORS)
def kv(request: pytest.FixtureRequest) -> Allocator:
    return ALLOCATORS[request.param]()


def test_closing_twice_raises(kv: Allocator) -> None:
    """Fault 16: always, not only under debug."""
    lead = start(kv, request(5, 4))
    kv.close(lead)
    with pytest.raises(PluginContractError, match="close of sequence 'r/0', which is never opened, or closed already"):
        kv.close(lead)
    kv.check()


def test_closing_a_suspended_copy_twice_raises(kv: Allocator) -> None:
    lead = start(kv, request(5, 4))
    assert kv.suspend([lead])
    kv.close(lead)
    with pytest.raises(PluginContractError, match="close of sequence 'r/0'"):
        kv.close(lead)
    kv.check()


@pytest.mark.parametrize(
    ("what", "act"),
    [
        ("reserve", lambda kv, s: kv.reserve(s, 0, 1)),
        ("commit", lambda kv, s: kv.commit(s, 1)),
        ("fork", lambda kv, s: kv.fork(s, Sequence("child", s.request), 0)),
        ("suspend", lambda kv, s: kv.suspend([s])),
    ],
)
def test_a_sequence_that_is_not_open_is_named(kv: Allocator, what: str, act: Callable[[Allocator, Sequence], object]) -> None:
    lead = request(5, 4, name="who").sequences[0]
    with pytest.raises(PluginContractError, match=f"{what} of sequence 'who/0', which is never opened"):
        act(kv, lead)
    start(kv, lead.request)
    assert kv.suspend([lead])
    with pytest.raises(PluginContractError, match=f"{what} of sequence 'who/0', which is suspended"):
        act(kv, lead)
    kv.check()


def test_resuming_what_is_not_suspended_is_an_error(kv: Allocator) -> None:
    lead = start(kv, request(5, 4))
    with pytest.raises(PluginContractError, match="resume of sequence 'r/0', which is not suspended"):
        kv.resume([lead])


def test_opening_twice_is_an_error(kv: Allocator) -> None:
    lead = start(kv, request(5, 4))
    with pytest.raises(PluginContractError, match="sequence 'r/0' was opened twice"):
        kv.open(lead)
    assert kv.suspend([lead])
    with pytest.raises(PluginContractError, match="sequence 'r/0' was opened twice"):
        kv.open(lead)


def test_suspending_more_than_is_committed_is_an_error(kv: Allocator) -> None:
    lead = start(kv, request(5, 4), computed=3)
    assert kv.reserve(lead, 3, 5)
    lead.num_computed = 5
    with pytest.raises(PluginContractError, match="5 positions of 'r/0' are computed, 3 committed"):
        kv.suspend([lead])
    kv.check()


def written(kv: Allocator, memory: Memory, name: str) -> Sequence:
    """A request whose 9 prompt tokens are computed and in memory."""
    lead = start(kv, request(range(ord(name), ord(name) + 9), 4, name=name))
    for slot, tag in zip(memory.slots(lead, 9), tags(lead.request.prompt), strict=True):
        memory.pool[slot] = tag
    return lead


def read(memory: Memory, sequence: Sequence) -> list[int | None]:
    return [memory.pool[slot] for slot in memory.slots(sequence, 9)]


def test_transfers_of_one_step_are_meant_in_their_order(kv: Allocator) -> None:
    """One comes back and another goes to the host places that the first has left: in before out."""
    memory = Memory(kv)
    first, second = written(kv, memory, "a"), written(kv, memory, "b")
    assert kv.suspend([first])
    memory.move(kv.drain_transfers())
    memory.pool[:] = [tag if tag in tags(second.request.prompt) else None for tag in memory.pool]
    assert kv.resume([first]) == [9]
    assert kv.suspend([second])
    transfers = kv.drain_transfers()
    assert {t.source for t in transfers if t.kind == "in"} & {t.target for t in transfers if t.kind == "out"}
    memory.move(transfers)
    assert read(memory, first) == tags(first.request.prompt)
    assert kv.resume([second]) == [9]
    memory.move(kv.drain_transfers())
    assert read(memory, second) == tags(second.request.prompt)


def test_a_failed_steps_transfers_come_first(kv: Allocator) -> None:
    """Those of the next plan build on them."""
    first, second = start(kv, request(9, 4, name="a")), start(kv, request(9, 4, name="b"))
    assert kv.suspend([first])
    lost = kv.drain_transfers()
    assert kv.suspend([second])
    kv.requeue(tuple(lost))
    transfers = kv.drain_transfers()
    assert transfers[: len(lost)] == lost
    assert len(transfers) > len(lost)


def test_opening_allocates_nothing(kv: Allocator) -> None:
    before = kv.usage()
    lead = request(5, 4).sequences[0]
    assert kv.open(lead) == 0
    assert kv.usage() == before
    kv.close(lead)
    assert kv.usage() == before


def test_a_commit_is_incremental_and_never_takes_back(kv: Allocator) -> None:
    lead = start(kv, request(9, 4), computed=4)
    assert kv.reserve(lead, 4, 9)
    kv.commit(lead, 7)
    kv.commit(lead, 5)
    assert kv.usage().filled == 7
    kv.check()


def test_reset_leaves_live_sequences_theirs(kv: Allocator) -> None:
    start(kv, request(9, 4))
    before = kv.usage()
    kv.reset()
    assert kv.usage() == before
    kv.check()


def test_stats_only_rise(kv: Allocator) -> None:
    lead = start(kv, request(9, 4, n=2))
    child = fork(kv, lead)
    kv.reserve(child, 9, 10)
    assert kv.suspend([lead])
    stats = kv.stats()
    assert stats.transfers == len(kv.drain_transfers()) > 0
    kv.close(lead)
    kv.close(child)
    assert kv.stats() == stats


@pytest.mark.parametrize("name", [name for name in ALLOCATORS if not name.startswith("prefix")])
def test_nothing_is_kept_across_requests_and_it_says_so(name: str) -> None:
    kv = ALLOCATORS[name]()
    assert kv.explain(request(9, 4)) == f"{type(kv).__name__} keeps nothing for reuse across requests"


@pytest.mark.parametrize(
    ("options", "wrong", "text"),
    [
        (paged.PagedOptions, {"block_size": 0}, "greater than or equal to 1"),
        (paged.PagedOptions, {"block_size": "16"}, "valid integer"),
        (paged.PagedOptions, {"blocksize": 16}, "Extra inputs are not permitted"),
        (contiguous.ContiguousOptions, {"reservation": "maximum"}, "'max', 'request', 'pow2' or 'oracle'"),
        (contiguous.ContiguousOptions, {"placement": "best_fit"}, "'first_fit' or 'buddy'"),
        (prefix.PrefixOptions, {"hash": "md5"}, r"'sha256' or 'xxh3\+compare'"),
        (prefix.PrefixOptions, {"eviction": "random"}, "'lru', 'lfu' or 'fifo'"),
    ],
)
def test_wrong_options_are_refused(options: type[paged.PagedOptions], wrong: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        options.model_validate(wrong)


def test_listing_imports_neither_numpy_nor_torch_and_building_no_torch() -> None:
    """`octavo plugins` must be quick, and the simulation runs without torch."""
    script = """
import sys
from octavo.core.descriptors import PoolShape
from octavo.plugins.allocators import contiguous, paged, prefix
plugins = [p for module in (contiguous, paged, prefix) for p in module.octavo_allocators()]
assert [p.name for p in plugins] == ["contiguous", "paged", "prefix"]
assert not {"numpy", "torch", "xxhash"} & set(sys.modules), "listed"
for plugin in plugins:
    plugin.build(plugin.options(), PoolShape(num_slots=64, num_host_slots=0, max_model_len=32, max_num_seqs=1)).check()
assert "torch" not in sys.modules, "built"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
