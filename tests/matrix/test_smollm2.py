"""The default model in fp32 on six real prompts: every stack gives the tokens of transformers' `generate`.

A first difference is accepted where the two largest logits of the reference are less than 1e-4 apart, and printed as a tie.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from octavo.core.assembly import build_engine
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import load_config
from octavo.core.sources import DEFAULT_MODEL, resolve
from octavo.core.text.tokenizer import Tokenizer
from octavo.llm import LLM
from tests.matrix.stacks import REGISTRY, build, generate, loaded
from tests.matrix.test_equal_tokens import STACKS
from tests.models import reference_model

LICENSE = Path(__file__).parents[2] / "LICENSE"
NEW_TOKENS = 16
TIE = 1e-4
TEXTS = {
    "English": "The capital of France is",
    "Korean": "안녕하세요, 오늘 서울의 날씨는",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "emoji": "I love 🍕 and 🎉! My favourite animals are 🐶,",
    "one token": "Once",
    "long": LICENSE.read_text(),
}
LENGTHS = {"one token": 1, "long": 1500}
SIZES = {"max_model_len": 1500 + NEW_TOKENS, "num_kv_slots": 6 * (1500 + NEW_TOKENS)}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@functools.cache
def folder() -> Path:
    """The model, from the cache or fetched once."""
    return resolve(DEFAULT_MODEL, report=print).path


@functools.cache
def prompts() -> dict[str, tuple[int, ...]]:
    """Token ids; the long one is cut to 1,500."""
    tokenizer = Tokenizer.from_folder(folder())
    ids = {name: tuple(tokenizer.encode(text)[: LENGTHS.get(name)]) for name, text in TEXTS.items()}
    for name, length in LENGTHS.items():
        assert len(ids[name]) == length
    return ids


@functools.cache
def reference(name: str) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens after a prompt, and how far apart the two largest logits were at each."""
    ids = torch.tensor([prompts()[name]])
    out = reference_model(folder()).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=reference_model(folder()).config.vocab_size,  # no token: all 16 are compared
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, ids.shape[1] :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def check(llm: LLM, names: Sequence[str]) -> None:
    """The answers to these prompts, batched: equal, or a tie at the first difference."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = generate(llm, [prompts()[name] for name in names], params)
    for name, output in zip(names, outputs, strict=True):
        expected, gaps = reference(name)
        found = output.outputs[0].token_ids
        assert len(found) == len(expected) == NEW_TOKENS
        at = next((i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            assert gaps[at] < TIE, f"{name}: token {at} is {found[at]}, transformers says {expected[at]} by {gaps[at]:.2g}"
            print(f"{llm.built.config.stack}, {name}: a tie at token {at} (gap {gaps[at]:.1e})")


@pytest.mark.parametrize("stack", STACKS)
def test_batched(stack: str) -> None:
    """All prompts at once; the long one once for each kernel and allocator."""
    names = [
        name for name in TEXTS if name != "long" or (STACKS[stack].scheduler.name, STACKS[stack].model.name) == ("continuous", "llama")
    ]
    with LLM.from_built(build(folder(), STACKS[stack], **SIZES)) as llm:
        check(llm, names)


def test_alone() -> None:
    """One prompt after the other, with the stack of an empty config."""
    config = load_config(REGISTRY, environ={}, overrides={"engine": {"device": "cpu", "dtype": "float32", "debug": True} | SIZES})
    with LLM.from_built(build_engine(REGISTRY, config, loaded(folder(), "llama", "torch"))) as llm:
        for name in TEXTS:
            check(llm, [name])
