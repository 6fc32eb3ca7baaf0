"""What is particular to `sdpa`: how many calls it makes, what it copies and how much, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from octavo.core.errors import IncompatibleStackError
from tests.plugins.kernels.cases import TOLERANCE, Case, Spec, build, make_case, run

BYTES = 2 * 2 * 64 * 4  # K and V of one position: two heads of 64 in fp32


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of each call of torch's function."""
    made: list[dict[str, Any]] = []
    original = F.scaled_dot_product_attention

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        made.append({"q": q, "k": k, "v": v, **options})
        return original(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return made


def _run(case: Case, **options: Any) -> int:
    """Compare with the reference -> bytes gathered."""
    kernel = build("sdpa", case.layer, **options)
    output = run(kernel, case)
    torch.testing.assert_close(output[: case.live], case.expected(), rtol=0, atol=TOLERANCE["float32"])
    return kernel.gathered_bytes


def test_decoding_rows_share_a_call(calls: list[dict[str, Any]]) -> None:
    """Twenty rows of similar length are one call, whose K and V are padded to the longest and not repeated for the query heads."""
    lengths = list(range(20, 40))
    gathered = _run(make_case(Spec(layout=4), [(length - 1, 1) for length in lengths]))
    assert [tuple(call["k"].shape) for call in calls] == [(20, 2, 39, 64)]
    assert gathered == 20 * 39 * BYTES


def test_rows_of_equal_length_need_no_mask(calls: list[dict[str, Any]]) -> None:
    """Nothing is padded, so nothing is masked."""
    _run(make_case(Spec(layout=4), [(29, 1)] * 4))
    assert [call["attn_mask"] for call in calls] == [None]


def test_unequal_rows_are_split(calls: list[dict[str, Any]]) -> None:
    """Short rows are not padded to a long one's length; the order of the rows does not matter."""
    lengths = [12, 900, 10, 880, 11, 9]
    gathered = _run(make_case(Spec(layout=4), [(length - 1, 1) for length in lengths]))
    assert [tuple(call["k"].shape[::2]) for call in calls] == [(2, 900), (4, 12)]
    assert gathered == (2 * 900 + 4 * 12) * BYTES


@pytest.mark.parametrize("limit", [1, 100 * BYTES, 150 * BYTES])
def test_gather_limit(calls: list[dict[str, Any]], limit: int) -> None:
    """No call of several rows copies more than `gather_limit` bytes."""
    lengths = [30, 50, 10, 45, 31, 29, 60, 8]
    _run(make_case(Spec(layout=4), [(length - 1, 1) for length in lengths]), gather_limit=limit)
    copied = [call["k"].nbytes + call["v"].nbytes for call in calls if call["k"].shape[0] > 1]
    assert all(size <= limit for size in copied)
    assert len(calls) == {1: 8, 100 * BYTES: 4, 150 * BYTES: 3}[limit]


def test_a_window_is_all_that_is_gathered(calls: list[dict[str, Any]]) -> None:
    """With a window of 13, a decoding row reads 13 positions."""
    case = make_case(Spec(layout=4, window="shorter"), [(38, 1), (30, 1), (25, 1)])
    assert case.layer.window == 13
    assert _run(case) == 3 * 13 * BYTES
    assert [call["attn_mask"] for call in calls] == [None]


def test_lone_rows_of_regions_are_read_in_place(calls: list[dict[str, Any]]) -> None:
    """A region is a view for a prompt, a chunk and a lone decoding row: nothing is copied; a whole prompt has no mask."""
    assert _run(make_case(Spec(layout="region"), [(0, 31), (12, 9), (40, 1)])) == 0
    assert sum(call["is_causal"] for call in calls) == 1


def test_blocks_that_follow_each_other_are_read_in_place() -> None:
    """The same for a block table whose blocks happen to be consecutive, and not for one whose blocks are not."""
    case = make_case(Spec(layout=4), [(0, 8)])
    copied = []
    for table in ([[1, 2]], [[2, 1]]):
        slots = torch.tensor([block * 4 + offset for block in table[0] for offset in range(4)])
        before = tuple(torch.full((16, 2, 64), torch.nan) for _ in range(2))
        after = tuple(tensor.index_copy(0, slots, new[:8]) for tensor, new in zip(before, (case.k, case.v), strict=True))
        meta = replace(
            case.meta, block_table=torch.tensor([*table, [0, 0]], dtype=torch.int32), slots=torch.cat([slots, torch.tensor([-1])])
        )
        copied.append(_run(replace(case, meta=meta, before=(before[0], before[1]), after=(after[0], after[1]))))
    assert copied == [0, 8 * BYTES]


def test_masks_are_bounded(calls: list[dict[str, Any]]) -> None:
    """A long windowed prompt is cut into pieces that read only what their window reaches."""
    case = make_case(Spec(layout=16, window="shorter", ratio=1, num_kv_heads=1), [(0, 1500)])
    _run(case)
    assert case.layer.window == 500
    assert [tuple(call["q"].shape[2:3] + call["k"].shape[2:3]) for call in calls] == [(500, 500), (512, 1011), (488, 987)]


def test_layers_without_support_are_refused() -> None:
    """A soft-cap or sinks are never silently left out, even if the compatibility check was bypassed."""
    for spec, feature in ((Spec(softcap=2.0), "a soft-cap"), (Spec(sinks=True), "sinks")):
        with pytest.raises(
            IncompatibleStackError, match=f"kernel 'sdpa' cannot compute {feature}, which layer 0 has; use kernel = \"naive\""
        ):
            build("sdpa", make_case(spec).layer)
