"""Tries a loaded model out: does its attention arrive whole, and is everything else a function of each token alone?

Passes over eight tokens in one flattened batch, with an attention in which each token sees itself alone: the model as it is, then
its two halves one after the other, then these in reverse order and with every other token replaced. q, k, v and logits of the tokens
that stayed must stay. From what arrives at the attention come the LayerSpecs; whatever a kernel would silently ignore is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.attention import LayerSpec
from octavo.core.descriptors import ModelShape
from octavo.plugins.models.transformers.config import Unsupported
from octavo.plugins.models.transformers.halves import Halves

_TOKENS = 8
_TOLERANCE = 0.02  # mean deviation over mean size: rounding in bf16 is far below, a wrong position or a neighbour's influence far above
_READ = {"attention_mask", "scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal"}
# Said already by q, k and v or by this plugin, or not about attention.
_INERT = {
    *("position_ids", "position_embeddings", "cache_position", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """What one layer handed to its attention. Tensors without the batch dimension."""

    q: torch.Tensor  # [H, T, Dk]
    k: torch.Tensor  # [G, T, Dk]
    v: torch.Tensor  # [G, T, Dv]
    arguments: dict[str, Any]


class _Watch:
    """Records the calls of one pass by layer; see `attention.Watch`."""

    def __init__(self) -> None:
        self.calls: dict[int, _Call] = {}

    def see(self, module: torch.nn.Module, *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise Unsupported(f"its {type(module).__name__} does not know which layer it is")
        if layer in self.calls:
            raise Unsupported(f"layer {layer} calls its attention more than once")
        if q.shape[1] % k.shape[1]:
            raise Unsupported(f"layer {layer} has {q.shape[1]} query heads for {k.shape[1]} KV heads")
        arguments.setdefault("is_causal", getattr(module, "is_causal", None))
        self.calls[layer] = _Call(q=q[0], k=k[0], v=v[0], arguments=arguments)
        return v.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(1, 2).contiguous()


@torch.inference_mode()
def probe(halves: Halves, shape: ModelShape, *, dtype: torch.dtype, device: torch.device) -> tuple[LayerSpec, ...]:
    """LayerSpecs of a transformers model whose attention is set to `attention.PROBE`. Raises Unsupported with what is wrong."""
    if "position_ids" not in inspect.signature(halves.model.forward).parameters:
        raise Unsupported("its forward has no argument position_ids")
    count = min(_TOKENS, shape.max_position_embeddings)
    positions = torch.arange(count, device=device)
    ids = (positions * 7919 + 13) % shape.vocab_size
    stay = positions[::2]
    there, logits = _pass(halves.whole, ids, positions)
    others, places = ids.clone(), positions.clone()
    others[1::2] = (others[1::2] + 1) % shape.vocab_size
    places[1::2] += min(count, shape.max_position_embeddings - count)
    if there.keys() != set(range(shape.num_layers)):
        silent = sorted(set(range(shape.num_layers)) - there.keys()) or sorted(there)
        raise Unsupported(f"of its {shape.num_layers} layers {len(there)} call their attention (see layer {silent[0]}): {_state()}")
    if logits.shape != (count, shape.vocab_size):
        raise Unsupported(f"its logits have the shape {list(logits.shape)}, not {[count, shape.vocab_size]}")
    logits = logits[stay]
    _, hidden = _pass(halves.hidden, ids, positions)
    if _differ(logits, _head(halves, hidden[stay])):
        raise Unsupported("its logits are not a function of each hidden state of its decoder")
    back, hidden = _pass(halves.hidden, others.flip(0), places.flip(0))
    for layer, call in sorted(there.items()):
        for name in ("q", "k", "v"):
            if _differ(getattr(call, name)[:, stay], getattr(back[layer], name).flip(1)[:, stay]):
                raise Unsupported(f"{name} of layer {layer} depends on more than each token and its position: {_state()}")
    if _differ(logits, _head(halves, hidden[count - 1 - stay])):
        raise Unsupported(f"its logits depend on more than each token, its position and attention: {_state()}")
    return tuple(_spec(layer, there[layer], shape, dtype) for layer in range(shape.num_layers))


def _state() -> str:
    return "it carries something from token to token beside the KV cache, or ignores position_ids"


def _pass(run: Callable[..., torch.Tensor], ids: torch.Tensor, positions: torch.Tensor) -> tuple[dict[int, _Call], torch.Tensor]:
    """Calls by layer, and what came out for each token."""
    watch = _Watch()
    try:
        out = run(ids, positions, watch)
    except Unsupported:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise Unsupported(f"its forward pass fails over a flattened batch: {type(error).__name__}: {error}") from error
    return watch.calls, out


def _head(halves: Halves, hidden: torch.Tensor) -> torch.Tensor:
    try:
        return halves.logits(hidden)
    except Exception as error:  # it computes more than logits, of what it is not given here
        raise Unsupported(f"its logits cannot be computed from hidden states of its decoder: {type(error).__name__}: {error}") from error


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.float(), b.float()
    return not bool((a - b).abs().mean() <= _TOLERANCE * a.abs().mean())  # NaN differs


def _spec(layer: int, call: _Call, shape: ModelShape, dtype: torch.dtype) -> LayerSpec:
    given = {name: value for name, value in call.arguments.items() if value is not None}
    unknown = sorted(given.keys() - _READ - _INERT)
    if unknown:
        raise Unsupported(f"layer {layer} gives its attention {', '.join(unknown)}, which kernels would ignore")
    if given.get("dropout"):
        raise Unsupported(f"layer {layer} asks for dropout")
    sizes = {
        "q": (shape.num_heads, shape.head_size_k),
        "k": (shape.num_kv_heads, shape.head_size_k),
        "v": (shape.num_kv_heads, shape.head_size_v),
    }
    for name, told in sizes.items():
        num_heads, _, size = getattr(call, name).shape
        if (num_heads, size) != told:
            read = f"but {told[0]} of {told[1]} were read from its config.json"
            raise Unsupported(f"{name} of layer {layer} has {num_heads} heads of {size}, {read}")
    if call.v.dtype != dtype:
        raise Unsupported(f"layer {layer} computes in {call.v.dtype}, not {dtype}")
    sinks: torch.Tensor | None = given.get("s_aux")
    found = {"window": _window(layer, given, shape), "softcap": given.get("softcap"), "sinks": sinks is not None}
    expected = {"window": shape.windows[layer], "softcap": shape.softcap, "sinks": shape.sinks}
    for name, value in found.items():
        if value != expected[name]:
            raise Unsupported(f"layer {layer} has {name} = {value}, but {expected[name]} was read from its config.json")
    return LayerSpec(
        index=layer,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size_k=shape.head_size_k,
        head_size_v=shape.head_size_v,
        scale=float(given.get("scaling", shape.head_size_k**-0.5)),
        window=shape.windows[layer],
        softcap=shape.softcap,
        sinks=sinks.detach() if sinks is not None else None,
    )


def _window(layer: int, given: dict[str, Any], shape: ModelShape) -> int | None:
    """The window that the layer's mask describes: the mask rules in the library's own attention, `sliding_window` is only a hint."""
    mask = given.get("attention_mask")
    if mask is None:
        if given.get("is_causal", True) and "sliding_window" not in given:
            return None
        raise Unsupported(f"layer {layer} comes without a mask, yet is not plainly causal")
    function: Callable[..., Any] | None = getattr(mask, "octavo_function", None)
    if function is None:
        raise Unsupported(f"layer {layer} has a mask of its own, which kernels would ignore")
    for window in dict.fromkeys((given.get("sliding_window"), shape.windows[layer], None)):
        if _describes(function, window, shape.max_position_embeddings):
            return window
    raise Unsupported(f"layer {layer} has a mask that is neither causal nor a window, which kernels would ignore")


def _describes(function: Callable[..., Any], window: int | None, length: int) -> bool:
    """Does a mask function of the library mean "causal, within `window`" for contexts of up to `length`? Tried where it would show."""
    head = torch.tensor(0)
    for q, k in _points(window, length):
        seen = k <= q and (window is None or k > q - window)
        try:
            if bool(function(head, head, torch.tensor(q), torch.tensor(k))) != seen:
                return False
        except (IndexError, RuntimeError):  # it looks positions up in a table of this batch
            return False
    return True


def _points(window: int | None, length: int) -> Iterator[tuple[int, int]]:
    """Pairs of query and key positions at the corners of both masks."""
    span = window or 1
    for q in {0, 1, 2, 5, length // 2, length - 1, span - 1, span, span + 1, 2 * span + 3} & set(range(length)):
        for k in {0, 1, q // 2, q - 1, q, q + 1, length - 1, q - span - 1, q - span, q - span + 1} & set(range(length)):
            yield q, k
