"""Weight-only int8 and int4 on the default model and a text of ours: as likely as before, and nearly the same likeliest tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.bench.quantization import WINDOW, Quality, open_variant, quality, windows_of
from octavo.core.native import absence

TEXT = Path(__file__).parents[1] / "quality" / "prose.txt"
WINDOWS = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(absence() is not None, reason="built without a compiler"),
]


def measured(quantization: str | None, dtype: str) -> Quality:
    with open_variant("smollm2-135m", quantization, dtype, ops="cpu") as llm:
        tokenizer = llm.built.loaded.tokenizer
        assert tokenizer is not None
        return quality(llm, windows_of(tokenizer.encode(TEXT.read_text(encoding="utf-8")))[:WINDOWS])


def test_quality_is_kept() -> None:
    """Against fp32: a token costs at most 0.02 nats more, and 9 of 10 positions have the same likeliest token; int8 0.01 and 19 of 20.

    The bounds lie between what rounding does and what a fault does: a scale of a neighbouring row or group leaves no text likely.
    """
    whole = measured(None, "float32")
    assert len(whole.best) == WINDOWS * (WINDOW - 1)
    for quantization, worse, same in (("int8", 0.01, 0.95), ("int4", 0.02, 0.9)):
        found = measured(quantization, "bfloat16")
        assert found.nll - whole.nll < worse, (quantization, found.nll, whole.nll)
        assert found.agreement(whole) > same, (quantization, found.agreement(whole))
