"""Every family runs as in transformers itself: whole or in pieces, alone or flattened together, dense or over a paged cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.clock import MonotonicClock
from octavo.core.descriptors import PoolShape
from octavo.core.engine import Engine
from octavo.core.model import Model
from octavo.core.sampling_params import SamplingParams
from octavo.core.torch_runner import TorchRunner
from octavo.plugins.allocators.paged import PAGED, PagedOptions
from octavo.plugins.kernels.naive import NAIVE
from octavo.plugins.schedulers.continuous import CONTINUOUS, ContinuousOptions
from tests.dense_attention import DenseAttention, greedy
from tests.hf_models import FAMILIES, NEW_TOKENS, PROMPTS, load, loaded, tiny
from tests.models import VOCAB, reference_gap, reference_model, reference_tokens


def _expected(family: str) -> tuple[tuple[int, ...], ...]:
    return reference_tokens(tiny(family), PROMPTS, NEW_TOKENS)


def _dense(
    family: str, prompt: tuple[int, ...], *, piece: int | None = None, shift_from: int | None = None, **faults: Any
) -> tuple[int, ...]:
    model = loaded(family)
    attend = DenseAttention(model.layers, **faults)
    return tuple(greedy(model, prompt, NEW_TOKENS, attend=attend, piece=piece, shift_from=shift_from))


def _reference_logits(family: str, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return reference_model(tiny(family))(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_of_the_reference_is_near_a_tie(family: str) -> None:
    """The two largest logits are over 1e-3 apart at every step, so that rounding cannot change a token."""
    assert reference_gap(tiny(family), PROMPTS, NEW_TOKENS) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("piece", [None, 3], ids=["whole", "in pieces"])
def test_right_attention_gives_the_tokens_of_transformers(family: str, piece: int | None) -> None:
    """Every prompt continues as `generate` continues it, computed whole or three tokens at a time."""
    assert tuple(_dense(family, prompt, piece=piece) for prompt in PROMPTS) == _expected(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_sequences_flattened_together_equal_those_of_each_alone(family: str) -> None:
    """All positions of all prompts in one batch, the second half of the longest first: fp32 logits agree with transformers' within 1e-3.

    So no layer looks at the neighbours in the batch: not the experts' routing, not positions, not norms. (The logits reach to 100.)
    """
    model = loaded(family)
    attends = [DenseAttention(model.layers) for _ in PROMPTS]
    lengths = [len(prompt) for prompt in PROMPTS]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(attends, q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([one(layer, *qkv) for one, *qkv in parts])

    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    positions = torch.cat([torch.arange(length) for length in lengths])
    logits = model.logits(model.forward(ids, positions, attend, rows=torch.arange(len(ids))))
    expected = torch.cat([_reference_logits(family, prompt) for prompt in PROMPTS])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_continuous_batching_over_a_paged_cache_gives_the_tokens_of_transformers(family: str) -> None:
    """The engine with the naive kernel, all prompts at once and two seats for three: prompts and decodes share steps."""
    model = loaded(family)
    assert _run(model, seats=2) == _expected(family)


def _run(model: Model, *, seats: int) -> tuple[tuple[int, ...], ...]:
    pool = PoolShape(num_slots=256, num_host_slots=0, max_model_len=64, max_num_seqs=seats)
    kv = PAGED.build(PagedOptions(block_size=4), pool)
    facts = model.shape.facts(device="cpu", dtype="float32", kv_dtype="float32")
    kernel = NAIVE.build(NAIVE.options(), model.layers, facts)
    clock = MonotonicClock()
    engine = Engine(
        scheduler=CONTINUOUS.build(ContinuousOptions(max_num_seqs=seats, max_num_batched_tokens=64), kv),
        kv=kv,
        runner=TorchRunner(model, kernel, kv, clock=clock, max_rows=seats, debug=True),
        max_model_len=pool.max_model_len,
        vocab_size=VOCAB,
        clock=clock,
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ids = [engine.add_request(prompt, params).id for prompt in PROMPTS]
    answers: dict[str, tuple[int, ...]] = {}
    for _ in range(200):
        answers |= {output.request_id: tuple(output.outputs[0].token_ids) for output in engine.step() if output.finished}
        if not engine.has_work:
            break
    engine.close()
    return tuple(answers[request_id] for request_id in ids)


_FAULTS: dict[str, dict[str, Any]] = {
    "ignored context": {"only_self": True},
    "shifted positions": {},
    "swapped KV heads": {"swap_kv_heads": True},
    "ignored window": {"no_window": True},
    "ignored softcap": {"no_softcap": True},
    "ignored sinks": {"no_sinks": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", _FAULTS)
def test_wrong_attention_changes_the_tokens_of_every_prompt(family: str, fault: str) -> None:
    """No prompt continues as `generate` continues it, unless the model has nothing that the fault could break."""
    layers = loaded(family).layers
    blind = {
        "ignored window": all(layer.window is None for layer in layers),
        "ignored softcap": all(layer.softcap is None for layer in layers),
        "ignored sinks": all(layer.sinks is None for layer in layers),
    }.get(fault, False)
    for prompt, right in zip(PROMPTS, _expected(family), strict=True):
        shift_from = max(1, len(prompt) - 2) if fault == "shifted positions" else None
        assert (_dense(family, prompt, shift_from=shift_from, **_FAULTS[fault]) == right) == blind


def test_the_families_have_what_their_faults_could_break() -> None:
    """Windows, soft-caps and sinks are where they should be, so that the test before tests them."""
    windows = {family for family in FAMILIES if any(layer.window for layer in loaded(family).layers)}
    assert windows == {"phi3", "gemma2", "gemma3", "gpt_oss"}
    assert {family for family in FAMILIES if loaded(family).layers[0].softcap} == {"gemma2"}
    assert {family for family in FAMILIES if loaded(family).layers[0].sinks is not None} == {"gpt_oss"}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_select_and_order(family: str) -> None:
    """Rows come out in the order asked for, repeated where asked for twice, none where none is asked for; argmax is theirs.

    Their logits are the same a row at a time, whatever a family does behind its LM head.
    """
    model, prompt = loaded(family), PROMPTS[1]

    def forward(rows: list[int]) -> torch.Tensor:
        ids = torch.tensor(prompt)
        return model.forward(ids, torch.arange(len(ids)), DenseAttention(model.layers), rows=torch.tensor(rows, dtype=torch.int64))

    whole, hidden = _reference_logits(family, prompt), forward([7, 2, 2])
    torch.testing.assert_close(model.logits(hidden), whole[[7, 2, 2]], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(torch.cat([model.logits(hidden[i : i + 1]) for i in (0, 1)]), whole[[7, 2]], atol=1e-3, rtol=1e-4)
    assert model.logits(forward([])).shape == (0, VOCAB)
    assert model.argmax(hidden).tolist() == whole[[7, 2, 2]].argmax(-1).tolist()


@pytest.mark.parametrize("family", ["gpt2", "gptj", "gemma2", "qwen3_moe", "gpt_oss"])
def test_bf16_stays_near_fp32(family: str) -> None:
    """In bf16 the probe passes, q, k and v arrive in bf16, and logits keep the direction of the fp32 ones."""
    model, prompt = load(tiny(family), dtype=torch.bfloat16), PROMPTS[2]
    dense, seen = DenseAttention(model.layers), set()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.update((q.dtype, k.dtype, v.dtype))
        return dense(layer, q, k, v)

    ids = torch.tensor(prompt)
    logits = model.logits(model.forward(ids, torch.arange(len(ids)), attend, rows=torch.arange(len(ids)))).float()
    assert seen == {torch.bfloat16}
    similarity = torch.nn.functional.cosine_similarity(logits, _reference_logits(family, prompt), dim=-1)
    assert similarity.median() > 0.98


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted(family: str) -> None:
    """`num_parameters` is transformers' count, ties once; `weight_bytes` adds only the small tables of RoPE to them."""
    model = loaded(family)
    count = sum(parameter.numel() for parameter in reference_model(tiny(family)).parameters())
    assert model.shape.num_parameters == count
    assert 4 * count <= model.weight_bytes() <= 1.05 * 4 * count
