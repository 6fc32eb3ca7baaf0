"""Every kernel equals the reference, whatever the step, the layout and the layer; and the comparison would notice if it didn't."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

from octavo.core import reference_attention
from octavo.core.attention import AttentionMetadata, Kernel, LayerSpec
from tests.plugins.kernels.cases import (
    DTYPES,
    KERNELS,
    LAYOUTS,
    STEPS,
    TOLERANCE,
    WINDOWS,
    Case,
    Layout,
    Spec,
    Window,
    attend,
    axes,
    build,
    facts,
    make_case,
    plugin,
    run,
)


def _check(name: str, spec: Spec, **options: Any) -> None:
    case = make_case(spec)
    output = run(build(name, case.layer, dtype=spec.dtype, **options), case)
    assert output.dtype == getattr(torch, spec.dtype)
    assert output.isfinite().all()
    torch.testing.assert_close(output[: case.live].float(), case.expected(), rtol=0, atol=TOLERANCE[spec.dtype])


def _pairwise() -> list[Any]:
    params = []
    for name in KERNELS:
        fields = axes(plugin(name).provides)
        for row in AllPairs(list(fields.values())):
            spec = Spec(**dict(zip(fields, row, strict=True)))
            params.append(pytest.param(name, spec, id="-".join(str(value) for value in (name, *row))))
    return params


@pytest.mark.parametrize(("name", "spec"), _pairwise())
def test_equals_reference(name: str, spec: Spec) -> None:
    """Within the dtype's rounding, with NaN in every unused slot; each pair of values of two axes occurs."""
    _check(name, spec)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "triton_paged"])  # to compile or interpret all would take hours
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_everywhere(name: str, layout: Layout, window: Window, dtype: str) -> None:
    """The same over the full product of all axes."""
    fields = axes(plugin(name).provides) | {"layout": [layout], "window": [window], "dtype": [dtype]}
    for row in itertools.product(*fields.values()):
        _check(name, Spec(**dict(zip(fields, row, strict=True))))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "triton_paged" else ()) for name in KERNELS])
@pytest.mark.parametrize("layout", ["region", 16])
def test_long_rows(name: str, layout: Layout) -> None:
    """Contexts of more than a thousand positions: chunks, prompts and decoded tokens, with a window and without."""
    rows = [(1300, 1), (900, 700), (0, 1100), (1021, 1), (5, 1)]
    for window in (None, "shorter"):
        case = make_case(Spec(layout=layout, window=window, ratio=2, num_kv_heads=1), rows)
        output = run(build(name, case.layer), case)
        torch.testing.assert_close(output[: case.live], case.expected(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("name", KERNELS)
def test_layers_of_several_kinds(name: str) -> None:
    """One kernel serves layers of different windows and head counts in one step."""
    wide = make_case(Spec(ratio=4))
    narrow = replace(wide.layer, index=1, window=5, num_heads=4)
    kernel = build(name, wide.layer, narrow)
    prepared = kernel.prepare(wide.on(kernel.device).meta)
    for layer in (wide.layer, narrow):
        case = replace(wide, layer=layer, q=wide.q[:, : layer.num_heads])
        output = attend(kernel, case, prepared)
        torch.testing.assert_close(output[: case.live], case.expected(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, "shorter"])
def test_rows_do_not_depend_on_each_other(name: str, layout: Layout, window: Any) -> None:
    """A row alone gets what it gets in the batch, to 1e-6 in fp32."""
    case = make_case(Spec(layout=layout, window=window))
    kernel = build(name, case.layer)
    together = run(kernel, case)
    for row in range(case.meta.num_rows - 1):
        alone = _only(case, row)
        output = attend(kernel, alone)
        begin, end = case.meta.query_start[row : row + 2].tolist()
        torch.testing.assert_close(output, together[begin:end], rtol=0, atol=1e-6)


def _only(case: Case, row: int) -> Case:
    """The case with one of its rows."""
    begin, end = case.meta.query_start[row : row + 2].tolist()
    meta = replace(
        case.meta,
        query_start=torch.tensor([0, end - begin], dtype=torch.int32),
        seq_lens=case.meta.seq_lens[row : row + 1],
        slots=case.meta.slots[begin:end],
        max_query_len=end - begin,
        max_seq_len=int(case.meta.seq_lens[row]),
        region_starts=None if case.meta.region_starts is None else case.meta.region_starts[row : row + 1],
        block_table=None if case.meta.block_table is None else case.meta.block_table[row : row + 1],
    )
    return replace(case, meta=meta, q=case.q[begin:end], k=case.k[begin:end], v=case.v[begin:end])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("layout", ["region", 4])
def test_empty_steps(name: str, layout: Layout) -> None:
    """A step of no rows gives [0, H, Dv]; rows without positions, and tokens behind the last row, give zeros and write nothing."""
    idle = make_case(Spec(layout=layout), [])
    assert (run(build(name, idle.layer), idle) == 0).all()
    meta = replace(idle.meta, query_start=idle.meta.query_start[:1], seq_lens=idle.meta.seq_lens[:0], slots=idle.meta.slots[:0])
    no_rows = replace(idle, meta=meta, q=idle.q[:0], k=idle.k[:0], v=idle.v[:0])
    assert run(build(name, idle.layer), no_rows).shape == (0, idle.layer.num_heads, idle.layer.head_size_v)

    case = make_case(Spec(layout=layout))
    padded = replace(
        case,
        meta=replace(case.meta, slots=torch.nn.functional.pad(case.meta.slots, (0, 3), value=-1)),
        q=torch.nn.functional.pad(case.q, (0, 0, 0, 0, 0, 3), value=torch.nan),
        k=torch.nn.functional.pad(case.k, (0, 0, 0, 0, 0, 3), value=torch.nan),
        v=torch.nn.functional.pad(case.v, (0, 0, 0, 0, 0, 3), value=torch.nan),
    )
    output = run(build(name, case.layer), padded)
    assert (output[case.live :] == 0).all()
    torch.testing.assert_close(output[: case.live], case.expected(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("step", STEPS)
def test_strided_inputs(name: str, step: str) -> None:
    """q, k and v may be views of one fused projection."""
    case = make_case(Spec(step=step))
    sizes = [case.q.shape[1], case.k.shape[1], case.v.shape[1]]
    q, k, v = torch.cat([case.q, case.k, case.v], dim=1).split(sizes, dim=1)
    assert not q.is_contiguous()
    output = run(build(name, case.layer), replace(case, q=q, k=k, v=v))
    torch.testing.assert_close(output[: case.live], case.expected(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("name", KERNELS)
def test_dead_tokens_of_live_rows(name: str) -> None:
    """A token of slot -1 in the middle of a step is not written; its neighbours are."""
    case = make_case(Spec(step="prefill"))
    dead = 1
    slots = case.meta.slots.clone()
    slots[dead] = -1
    meta = replace(case.meta, slots=slots)
    unwritten = (case.after[0].clone(), case.after[1].clone())
    for tensor in unwritten:
        tensor[case.meta.slots[dead]] = torch.nan
    run(build(name, case.layer), replace(case, meta=meta, after=unwritten))


class _WriteOnly(Kernel):
    """A kernel that keeps the default `write`."""

    def prepare(self, meta: AttentionMetadata) -> None:
        return None

    def attend(self, *_: Any) -> torch.Tensor:
        raise NotImplementedError


def test_default_write() -> None:
    """The interface's own `write` stores what the step's slots say, and nothing at -1."""
    case = make_case(Spec())
    cache = (case.before[0].clone(), case.before[1].clone())
    kernel = _WriteOnly([case.layer], dtype=torch.float32, device=torch.device("cpu"))
    kernel.write(cache, case.k, case.v, case.meta, None)
    for tensor, after in zip(cache, case.after, strict=True):
        torch.testing.assert_close(tensor, after, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", KERNELS)
def test_refuses_another_kv_dtype(name: str) -> None:
    """KV of another dtype than the model's is refused with what to set; the model's own is accepted."""
    descriptor = plugin(name)
    options = descriptor.options()
    assert list(descriptor.rejects(options, facts("bfloat16"))) == []
    assert list(descriptor.rejects(options, facts("bfloat16", kv_dtype="float32"))) == [
        "keeps KV in the model's dtype: kv_dtype must be 'bfloat16' or 'auto', not 'float32'"
    ]


# Blindness: each of these wrong attentions must fail the comparison above.

Visible = Callable[[torch.Tensor, torch.Tensor, int | None], torch.Tensor]
_visible = reference_attention.visible_keys

BROKEN_MASKS: dict[str, Visible] = {
    "ignores the context": lambda queries, keys, _: queries[:, None] == keys,
    "drops the first token": lambda queries, keys, window: _visible(queries, keys, window) & ((keys > 0) | (queries[:, None] == 0)),
    "drops its own token": lambda queries, keys, window: _visible(queries, keys, window) & ((keys != queries[:, None]) | (keys == 0)),
    "is shifted by one": lambda queries, keys, window: _visible((queries - 1).clamp(min=0), keys, window),
    "sees the future": lambda queries, keys, window: _visible(queries + 1, keys, window),
    "ignores the window": lambda queries, keys, _: _visible(queries, keys, None),
    "has a window one too long": lambda queries, keys, window: _visible(queries, keys, window and window + 1),
    "has a window one too short": lambda queries, keys, window: _visible(queries, keys, window and window - 1),
}

BROKEN_LAYERS: dict[str, Callable[[LayerSpec], LayerSpec]] = {
    "ignores the soft-cap": lambda layer: replace(layer, softcap=None),
    "ignores the sinks": lambda layer: replace(layer, sinks=None),
    "ignores the scale": lambda layer: replace(layer, scale=1.0),
}


def _featured(step: str, dtype: str) -> Case:
    """A case in which every feature matters."""
    return make_case(Spec(step=step, window="shorter", softcap=2.0, sinks=True, dtype=dtype))


def _assert_noticed(case: Case, broken: torch.Tensor, *, dtype: str, rows: list[int]) -> None:
    """The comparison fails: in fp32 in each of `rows`, by ten times what it allows; in 16 bits in one of them."""
    difference = (broken - case.expected()).abs().amax(dim=(1, 2))
    bounds = case.meta.query_start.tolist()
    worst = [float(difference[bounds[row] : bounds[row + 1]].max()) for row in rows]
    assert worst
    if dtype == "float32":
        assert min(worst) > 10 * TOLERANCE[dtype], dict(zip(rows, worst, strict=True))
    else:
        assert max(worst) > TOLERANCE[dtype], dict(zip(rows, worst, strict=True))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutant", BROKEN_MASKS)
def test_notices_a_broken_mask(mutant: str, dtype: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at wrong positions is noticed in every row in which the mask is another one."""
    if mutant == "sees the future" and step == "decode":
        step = "chunk"  # a row's last token has no future in the cache
    case = _featured(step, dtype)
    if "window" not in mutant:
        case = replace(case, layer=replace(case.layer, window=None))
    broken_mask = BROKEN_MASKS[mutant]
    news = case.meta.query_start.diff().tolist()
    rows = []
    for row, (length, new) in enumerate(zip(case.meta.seq_lens.tolist(), news, strict=True)):
        keys = torch.arange(length)
        arguments = (keys[length - new :], keys, case.layer.window)
        if length and not torch.equal(_visible(*arguments), broken_mask(*arguments)):
            rows.append(row)
    with monkeypatch.context() as patch:
        patch.setattr(reference_attention, "visible_keys", broken_mask)
        broken = case.expected()
    _assert_noticed(case, broken, dtype=dtype, rows=rows)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutant", BROKEN_LAYERS)
def test_notices_a_broken_layer(mutant: str, dtype: str, step: str) -> None:
    """Ignoring a feature of the layer is noticed in every row of more than one position."""
    case = _featured(step, dtype)
    broken = replace(case, layer=BROKEN_LAYERS[mutant](case.layer)).expected()
    _assert_noticed(case, broken, dtype=dtype, rows=[row for row, length in enumerate(case.meta.seq_lens.tolist()) if length > 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_notices_swapped_heads(dtype: str) -> None:
    """Reading another KV head, for K, V or both, or dealing query heads out to KV heads in turn, is noticed in every row."""
    case = _featured("mixed", dtype)
    rows = [row for row, length in enumerate(case.meta.seq_lens.tolist()) if length > 1]
    k, v = case.after
    for cache in ((k.flip(1), v.flip(1)), (k.flip(1), v), (k, v.flip(1))):
        _assert_noticed(case, replace(case, after=cache).expected(), dtype=dtype, rows=rows)
    dealt = torch.arange(case.layer.num_heads).view(case.layer.num_kv_heads, case.layer.group).T.flatten()
    plain = replace(case, layer=replace(case.layer, sinks=None))
    broken = replace(plain, q=case.q[:, dealt.argsort()]).expected()[:, dealt]
    _assert_noticed(plain, broken, dtype=dtype, rows=rows)
