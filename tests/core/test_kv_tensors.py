"""Transfers between slots: fused or not, and interrupted or not, the result is that of list order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import psutil
import pytest
import torch

from octavo.core.attention import Kernel, LayerSpec, TensorSpec
from octavo.core.kv_tensors import LONGEST_FUSED, KVTensors, allocate_cache, fused
from octavo.core.plan import Transfer

LAYERS = [LayerSpec(index=i, num_heads=2, num_kv_heads=1, head_size_k=3, head_size_v=2, scale=1.0) for i in range(2)]
CPU = torch.device("cpu")
SLOTS, HOST_SLOTS = 48, 32


class Cacheless(Kernel):
    """Only its cache matters here."""

    def cache_spec(self, layer: LayerSpec) -> tuple[TensorSpec, ...]:
        scales = TensorSpec("scales", (layer.num_kv_heads,), torch.float64)
        return (*super().cache_spec(layer), scales)

    def prepare(self, meta: object) -> None: ...

    def attend(self, *args: object) -> torch.Tensor:
        raise NotImplementedError


def pool(num_slots: int = SLOTS, num_host_slots: int = HOST_SLOTS) -> KVTensors:
    """Tensors in which every element is another number."""
    tensors = KVTensors(Cacheless(LAYERS, dtype=torch.float32, device=CPU), num_slots=num_slots, num_host_slots=num_host_slots, device=CPU)
    count = 0
    for cache in (*tensors.device, *tensors.host):
        for tensor in cache:
            tensor.copy_(torch.arange(count, count + tensor.numel()).view(tensor.shape))
            count += tensor.numel()
    return tensors


def contents(tensors: KVTensors) -> list[list[list[float]]]:
    return [[tensor.flatten(1).tolist() for tensor in cache] for cache in (*tensors.device, *tensors.host)]


def in_list_order(state: list[list[list[float]]], transfers: Sequence[Transfer]) -> list[list[list[float]]]:
    """Plain lists, one slot after the other."""
    state = [[list(tensor) for tensor in cache] for cache in state]
    device, host = state[: len(LAYERS)], state[len(LAYERS) :]
    for transfer in transfers:
        sources = host if transfer.kind == "in" else device
        targets = host if transfer.kind == "out" else device
        for source, target in zip(sources, targets, strict=True):
            for read, written in zip(source, target, strict=True):
                written[transfer.target : transfer.target + transfer.count] = read[transfer.source : transfer.source + transfer.count]
    return state


def random_transfers(rng: random.Random) -> list[Transfer]:
    """Aligned blocks of one size, as a paged pool makes them, or runs of any length; sides of one transfer never overlap."""
    size, transfers = rng.choice((1, 1, 4, None)), list[Transfer]()
    kinds = rng.choice((["copy"], ["out", "in"], ["copy", "copy", "copy", "out", "in"]))
    while len(transfers) < 12:
        kind = rng.choice(kinds)
        count = size or rng.randrange(1, 9)
        source = rng.randrange((HOST_SLOTS if kind == "in" else SLOTS) // count) * count
        target = rng.randrange((HOST_SLOTS if kind == "out" else SLOTS) // count) * count
        if kind != "copy" or abs(source - target) >= count:
            transfers.append(Transfer(kind, source, target, count))  # type: ignore[arg-type]
    return transfers


def test_random_transfers_equal_list_order_however_they_are_fused_or_interrupted() -> None:
    """Now and then a run fails after some tensors only; what was not counted as done is then repeated."""
    seen: Counter[str] = Counter()
    for number in range(300):
        rng = random.Random(number)
        transfers = random_transfers(rng)
        tensors = pool()
        expected = in_list_order(contents(tensors), transfers)
        done = 0
        fails_at = rng.randrange(8)
        for attempt, run in enumerate(list(fused(transfers))):
            if attempt == fails_at:
                device, host = tensors.device, tensors.host
                tensors.device, tensors.host = device[:1], host[:1]
                tensors.move(run)  # half way, then it fails
                tensors.device, tensors.host = device, host
                break
            tensors.move(run)
            done += len(run)
            seen["fused" if len(run) > 1 else "alone"] += 1
        seen["repeated"] += done < len(transfers)
        for run in fused(transfers[done:]):
            tensors.move(run)
        assert contents(tensors) == expected, transfers
    assert min(seen["fused"], seen["alone"], seen["repeated"]) > 50, seen


@pytest.mark.parametrize(
    ("transfers", "runs"),
    [
        ([Transfer("copy", 0, 8, 1), Transfer("copy", 1, 9, 1), Transfer("copy", 0, 10, 1)], [3]),  # one source, two targets
        ([Transfer("copy", 0, 8, 4), Transfer("copy", 8, 12, 4)], [1, 1]),  # reads what was written
        ([Transfer("copy", 0, 8, 4), Transfer("copy", 4, 2, 2)], [1, 1]),  # writes what was read: could not be repeated
        ([Transfer("copy", 0, 8, 4), Transfer("copy", 20, 10, 4)], [1, 1]),  # writes twice
        ([Transfer("out", 0, 0, 4), Transfer("out", 4, 4, 4)], [2]),  # equal numbers in two memories
        ([Transfer("out", 0, 0, 4), Transfer("in", 8, 0, 4)], [1, 1]),  # another kind
        ([Transfer("copy", 0, 1000, LONGEST_FUSED + 1), Transfer("copy", 0, 5000, 1)], [1, 1]),  # long: a slice is cheaper
        ([Transfer("copy", 2 * i, 2 * i + 1, 1) for i in range(500)], [500]),
        ([], []),
    ],
)
def test_only_disjoint_neighbours_are_fused(transfers: list[Transfer], runs: list[int]) -> None:
    """Lengths of the runs."""
    found = list(fused(transfers))
    assert [len(run) for run in found] == runs
    assert [transfer for run in found for transfer in run] == transfers


def test_hundreds_of_blocks_move_in_one_step_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in layers x tensors x blocks small copies."""
    tensors = pool(num_slots=1200, num_host_slots=0)
    transfers = [Transfer("copy", 2 * i, 2 * i + 1, 1) for i in range(500)]
    expected = in_list_order(contents(tensors), transfers)
    operations: list[str] = []

    class Counting(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg]
            operations.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    with Counting():
        for run in fused(transfers):
            tensors.move(run)
    assert contents(tensors) == expected
    assert operations.count("__setitem__") == len(LAYERS) * 3


def test_what_nobody_wrote_can_be_told() -> None:
    """Zeros, or what is asked for; the specs give number, shape and type of the tensors."""
    kernel = Cacheless(LAYERS, dtype=torch.float16, device=CPU)
    for fill in (None, float("nan")):
        caches = allocate_cache(kernel, 5, CPU, fill=fill)
        assert [[(t.shape, t.dtype) for t in cache] for cache in caches] == 2 * [
            [((5, 1, 3), torch.float16), ((5, 1, 2), torch.float16), ((5, 1), torch.float64)]
        ]
        assert all(bool((t.isnan() if fill else t == 0).all()) for cache in caches for t in cache)


def test_a_pool_takes_no_memory_until_it_is_written() -> None:
    """512 MiB of zeros add next to nothing to the process; what is written does. Tensors lie on cache lines, whatever their size."""
    process = psutil.Process()
    before = process.memory_info().rss
    spec = LayerSpec(index=0, num_heads=1, num_kv_heads=1, head_size_k=64, head_size_v=64, scale=1.0)
    ((k, v, _),) = allocate_cache(Cacheless([spec], dtype=torch.bfloat16, device=CPU), 2**21, CPU)
    assert (k.shape, v.dtype, k.is_contiguous()) == ((2**21, 1, 64), torch.bfloat16, True)
    assert process.memory_info().rss - before < 50 * 2**20
    k[: 2**20] = 1
    assert process.memory_info().rss - before > 120 * 2**20
    assert not k[2**20 :: 997].any() and not v[::997].any()
    for slots in (1, 7, 1000):
        for tensor in allocate_cache(Cacheless(LAYERS, dtype=torch.float32, device=CPU), slots, CPU)[0]:
            assert tensor.data_ptr() % 64 == 0 and not tensor.any()
