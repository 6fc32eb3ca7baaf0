"""Prompts that begin alike are sent together, long ones first, and answers come in the caller's order (S7)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM
from octavo.prompt_order import sending_order

A, B, C = [1, 2], [3, 4], [5, 6]  # blocks of two


@pytest.mark.parametrize(
    ("prompts", "block_size", "order"),
    [
        ([], 2, []),
        ([[1], [2], [3, 4, 5]], 2, [2, 0, 1]),  # nothing shared: by length, else as given
        ([A + B, C, A + C + C, C + B + [9], A], 2, [2, 0, 4, 3, 1]),  # the group of the longest member first
        ([A + B + [7], C + [7] * 9, A + B + [8, 9], A + C + [7] * 4], 2, [1, 3, 2, 0]),  # groups in a group
        ([[1, 7, 7], [2] * 4, [1, 8, 8, 8, 8]], 2, [2, 1, 0]),  # one token in common is no block
        ([A + B, C, A + C + C, C + B + [9], A], 0, [2, 3, 0, 1, 4]),  # no blocks: by length alone
        ([A + B, A + B, A + B], 2, [0, 1, 2]),
    ],
)
def test_the_order(prompts: list[list[int]], block_size: int, order: list[int]) -> None:
    """By hand."""
    assert sending_order(prompts, block_size=block_size) == order


def test_very_long_prompts_that_are_alike() -> None:
    """Depth costs nothing but memory: no recursion, no comparison of all with all."""
    prompts = [[7] * 40_000 + [i] for i in range(5)] + [[7] * 40_001 + [8]]
    assert sending_order(prompts, block_size=1) == [5, 0, 1, 2, 3, 4]


def test_a_small_pool_finds_more_of_what_is_sent_together(new_llm: Callable[..., LLM]) -> None:
    """Three documents, four questions on each, and slots for little more than one of them: each document is computed once."""
    documents = [[(5 + 31 * d + 7 * i) % 384 for i in range(24)] for d in range(3)]
    prompts = [{"prompt_token_ids": [*document, 100 + question]} for question in range(4) for document in documents]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    settings = {"allocator": "prefix", "num_kv_slots": 40, "max_model_len": 32, "max_num_seqs": 1}
    together, in_turn = new_llm(**settings), new_llm(**settings)
    outputs = together.generate(prompts, params, use_tqdm=False)
    one_by_one = [output for prompt in prompts for output in in_turn.generate(prompt, params, use_tqdm=False)]
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in one_by_one]
    found, found_in_turn = (llm.engine.kv.stats().hit_tokens for llm in (together, in_turn))
    assert found == 3 * 3 * 24 and found_in_turn < found / 2
