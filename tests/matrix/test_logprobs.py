"""The same log probabilities, whatever the stack: each equals transformers' log_softmax, of outputs and of prompts.

Over every stack that runs x family x ample pool or one that preempts x block size x token budget, cold and then warm; pairwise.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from octavo.core.logprobs import Logprob, TokenLogprobs
from octavo.core.outputs import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM
from tests.logprobs import check_entries, reference_logits
from tests.matrix.stacks import Steps, build, generate
from tests.matrix.test_equal_tokens import MAX_MODEL_LEN, POOLS, STACKS, chunking, pairs
from tests.models import FAMILIES, PROMPTS, reference_tokens, tiny

MAX_TOKENS = 12
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}
# In turn: both, outputs' alone (such a request reads the prefix cache), prompt's alone, none.
ASKED: list[dict[str, Any]] = [{"logprobs": 3, "prompt_logprobs": 2}, {"logprobs": 0}, {"prompt_logprobs": 0}, {}]
AXES: list[list[Any]] = [list(FAMILIES), list(POOLS), [1, 4, 16], [None, 7]]


def check(output: RequestOutput, params: SamplingParams, folder: Path) -> None:
    """Every position is there, as transformers has it; what was not asked for isn't."""
    prompt, made = tuple(output.prompt_token_ids), output.outputs[0]
    assert tuple(made.token_ids) == reference_tokens(folder, (prompt,), MAX_TOKENS)[0]
    logits = reference_logits(folder, (*prompt, *made.token_ids))
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        check_entries(
            _entries(output.prompt_logprobs[1:], prompt[1:], params.prompt_logprobs),
            logits[: len(prompt) - 1],
            prompt[1:],
            params.prompt_logprobs,
        )
    if params.logprobs is None:
        assert made.logprobs is made.cumulative_logprob is None
    else:
        assert made.logprobs is not None
        entries = _entries(made.logprobs, made.token_ids, params.logprobs)
        check_entries(entries, logits[len(prompt) - 1 : -1], made.token_ids, params.logprobs)
        assert made.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in entries))


def _entries(readable: Seq[dict[int, Logprob] | None], token_ids: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """Back to the form in which a step brings them: the likeliest are those of rank 1 to `num_top`."""
    found = []
    for entry, token in zip(readable, token_ids, strict=True):
        assert entry is not None and next(iter(entry)) == token
        top = sorted((value.rank, other, value.logprob) for other, value in entry.items() if value.rank <= num_top)
        found.append(TokenLogprobs(token, entry[token].logprob, entry[token].rank, tuple((other, value) for _, other, value in top)))
    return found


@pytest.mark.parametrize(("name", "family", "pool", "block_size", "budget"), pairs(*AXES))
def test_logprobs_equal_transformers(name: str, family: str, pool: str, block_size: int, budget: int | None) -> None:
    """Prompts in pieces, out of a warm cache, through preemptions; and the tokens are those of requests that do not ask (fault 36)."""
    options = {"max_model_len": MAX_MODEL_LEN, "num_kv_slots": POOLS[pool], "max_num_seqs": len(PROMPTS), "block_size": block_size}
    if budget and chunking(name):
        options["max_num_batched_tokens"] = budget
    params = [SamplingParams(**GREEDY, **ASKED[i % len(ASKED)]) for i in range(len(PROMPTS))]
    with LLM.from_built(build(tiny(family), STACKS[name], **options)) as llm:
        for shift in range(2):  # warm, another prompt asks for each
            turn = [*params[shift:], *params[:shift]]
            for output, asked in zip(generate(llm, PROMPTS, turn), turn, strict=True):
                check(output, asked, tiny(family))


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_a_prompt_that_is_preempted_on_the_way_is_scored_once(allocator: str) -> None:
    """The tiny pool runs dry while prompts that ask are computed in pieces."""
    name, steps = f"chunked + {allocator} + sdpa + torch + llama", Steps()
    options = {"max_model_len": MAX_MODEL_LEN, "num_kv_slots": MAX_MODEL_LEN, "max_num_seqs": 6, "block_size": 1}
    params = [SamplingParams(**GREEDY, prompt_logprobs=i % 3, logprobs=i % 2) for i in range(len(PROMPTS))]
    with LLM.from_built(build(tiny("llama_gqa"), STACKS[name], max_num_batched_tokens=7, **options)) as llm:
        llm.engine.observers.add(steps)
        for output, asked in zip(generate(llm, PROMPTS, params), params, strict=True):
            check(output, asked, tiny("llama_gqa"))
    assert steps.preemptions > 0


def test_a_cached_prompt_is_scored_at_every_position() -> None:
    """Fault 7: whole blocks of it are cached, and all positions come out; a request that asks for none reads the cache as ever."""
    name = "chunked + prefix + sdpa + torch + llama"
    options = {"max_model_len": MAX_MODEL_LEN, "num_kv_slots": 1024, "max_num_seqs": 4, "block_size": 4}
    with LLM.from_built(build(tiny("llama_gqa"), STACKS[name], **options)) as llm:
        asks: list[dict[str, Any]] = [{}, {"prompt_logprobs": 1}, {"logprobs": 1}, {"prompt_logprobs": 1, "logprobs": 0}]
        for asked in asks:
            params = SamplingParams(**GREEDY, **asked)
            [output] = generate(llm, [PROMPTS[3]], params)
            check(output, params, tiny("llama_gqa"))
            assert output.num_cached_tokens == (12 if asked == {"logprobs": 1} else 0)
