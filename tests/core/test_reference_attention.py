"""The reference computes what torch and transformers compute, for each feature: it judges kernels, so others' code judges it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import MistralConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mistral import modeling_mistral

from octavo.core.attention import AttentionMetadata
from octavo.core.reference_attention import reference_attention
from tests.plugins.kernels.cases import LAYOUTS, TOLERANCE, Case, Layout, Spec, make_case

LENGTH = 37


def _prompt(**spec: Any) -> tuple[Case, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A whole prompt as one row, and its q, k, v as [1, heads, LENGTH, D]."""
    case = make_case(Spec(**spec), [(0, LENGTH)])
    q, k, v = (tensor[:LENGTH].transpose(0, 1).unsqueeze(0) for tensor in (case.q, case.k, case.v))
    return case, q, k, v


def _mask(window: int | None) -> torch.Tensor:
    """The mask that transformers makes for Mistral's eager attention, [1, 1, LENGTH, LENGTH]."""
    config = MistralConfig(sliding_window=window)
    config._attn_implementation = "eager"
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    mask = make(config, torch.zeros(1, LENGTH, 8), None, None, position_ids=torch.arange(LENGTH)[None])
    assert isinstance(mask, torch.Tensor)
    return mask


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ratio", [1, 3, 8])
def test_equals_torch_sdpa(layout: Layout, ratio: int) -> None:
    """Causal attention over a prompt is torch's own, for every layout and GQA ratio, in double precision."""
    case, q, k, v = _prompt(layout=layout, ratio=ratio)
    theirs = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, scale=case.layer.scale, enable_gqa=True)
    ours = reference_attention(case.q, case.after, case.meta, case.layer, dtype=torch.float64)
    torch.testing.assert_close(ours[:LENGTH], theirs[0].transpose(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, "one", "shorter", "equal", "longer"])
def test_equals_mistral(window: Any) -> None:
    """Windows hide what the mask hides that transformers makes for Mistral."""
    case, q, k, v = _prompt(window=window)
    module: Any = SimpleNamespace(num_key_value_groups=case.layer.group, training=False)
    theirs, _ = modeling_mistral.eager_attention_forward(module, q, k, v, _mask(case.layer.window), scaling=case.layer.scale)
    torch.testing.assert_close(case.expected(), theirs[0], rtol=0, atol=TOLERANCE["float32"])


def test_equals_gemma2() -> None:
    """The soft-cap is Gemma 2's."""
    case, q, k, v = _prompt(softcap=2.0)
    module: Any = SimpleNamespace(num_key_value_groups=case.layer.group, training=False)
    theirs, _ = modeling_gemma2.eager_attention_forward(module, q, k, v, _mask(None), scaling=case.layer.scale, softcap=2.0)
    torch.testing.assert_close(case.expected(), theirs[0], rtol=0, atol=TOLERANCE["float32"])


def test_equals_gpt_oss() -> None:
    """Sinks are gpt-oss's, alone and together with a window."""
    for window in (None, "shorter"):
        case, q, k, v = _prompt(sinks=True, window=window)
        module: Any = SimpleNamespace(num_key_value_groups=case.layer.group, training=False, sinks=case.layer.sinks)
        theirs, _ = modeling_gpt_oss.eager_attention_forward(module, q, k, v, _mask(case.layer.window), scaling=case.layer.scale)
        torch.testing.assert_close(case.expected(), theirs[0], rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_equal_the_whole(layout: Layout) -> None:
    """The last tokens of a prompt, as a chunk or as one decoded token, get what they get within the whole prompt."""
    whole, *_ = _prompt(layout=layout, window="shorter")
    expected = reference_attention(whole.q, whole.after, whole.meta, whole.layer)
    for new in (1, 5):
        meta = AttentionMetadata(
            query_start=torch.tensor([0, new]),
            seq_lens=torch.tensor([LENGTH]),
            slots=whole.meta.slots[LENGTH - new : LENGTH],
            max_query_len=new,
            max_seq_len=LENGTH,
            region_starts=whole.meta.region_starts,
            block_table=whole.meta.block_table,
            block_size=whole.meta.block_size,
        )
        piece = reference_attention(whole.q[LENGTH - new : LENGTH], whole.after, meta, whole.layer)
        torch.testing.assert_close(piece, expected[LENGTH - new : LENGTH], rtol=0, atol=1e-6)


def test_empty_rows_are_finite() -> None:
    """A row without positions gets zeros although the slots that its table names hold NaN."""
    case = make_case(Spec())
    output = reference_attention(case.q, case.after, case.meta, case.layer)
    assert output[case.live :].shape[0] == 1
    assert (output[case.live :] == 0).all()
    assert output.isfinite().all()
