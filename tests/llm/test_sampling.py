"""Sampling, stopping and text through the whole engine: what a request asks for comes out, whatever else runs and however often it is
preempted."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import RequestError
from octavo.core.outputs import StepReport
from octavo.core.text.tokenizer import Tokenizer
from tests.llm.conftest import is_empty
from tests.models import tiny

SLOT_BYTES = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head size, fp32
HOT = {"temperature": 4.0, "max_tokens": 24}  # so hot that a wrong random number shows
PROMPTS = ["one", "two two", "three three three", "4", "five five five five five", "6 6"]


class Preemptions:
    """Counts them, and what they move."""

    def __init__(self) -> None:
        self.count = self.most_on_host = 0
        self.moved = Counter[str]()

    def octavo_step_finished(self, report: StepReport) -> None:
        self.count += report.num_preempted
        self.moved.update(report.transfers)
        self.most_on_host = max(self.most_on_host, report.usage.host)


def answers(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def text_of(llm: LLM, token_ids: list[int], **options: Any) -> str:
    tokenizer = llm.built.loaded.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.02}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}])
def test_a_seed_gives_the_same_tokens_in_any_company(llm: LLM, filters: dict[str, Any]) -> None:
    """Alone, in a batch, in a batch in reverse: equal tokens; other seeds give other ones (fault 34)."""
    each = [SamplingParams(seed=seed, **HOT, **filters) for seed in range(len(PROMPTS))]
    together = answers(llm, PROMPTS, each)
    assert [answers(llm, prompt, params)[0] for prompt, params in zip(PROMPTS, each, strict=True)] == together
    assert answers(llm, PROMPTS[::-1], each[::-1])[::-1] == together
    same_prompt = answers(llm, ["one"] * 6, each)
    assert len({tuple(made) for made in same_prompt}) == 6


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them(new_llm: Callable[..., LLM]) -> None:
    """Each request gets random numbers of its own; a second engine of the same seed gives the same, one of another seed doesn't."""
    runs = [answers(new_llm(seed=seed), ["one"] * 4, SamplingParams(**HOT)) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(made) for made in runs[0]}) == 4


def test_preemption_changes_nothing(llm: LLM, new_llm: Callable[..., LLM]) -> None:
    """In a pool that runs dry all the time, sampled and greedy tokens, text and usage are those of an ample one (faults 14, 18)."""
    small = new_llm(num_kv_slots=64, max_model_len=64)
    seen = Preemptions()
    small.engine.observers.add(seen)
    params = [SamplingParams(seed=1, **HOT), SamplingParams(temperature=0, max_tokens=30)] * 3
    ample, tight = (made.generate(PROMPTS, params, use_tqdm=False) for made in (llm, small))
    assert seen.count > 0 and sum(output.num_preemptions for output in tight) > 0
    assert [output.outputs for output in tight] == [output.outputs for output in ample]
    assert is_empty(small)
    pieces = [list(itertools.chain(small.stream(prompt, one))) for prompt, one in zip(PROMPTS, params, strict=True)]
    assert ["".join(piece.outputs[0].text for piece in run) for run in pieces] == [output.outputs[0].text for output in ample]


@pytest.mark.parametrize("allocator", ["paged", "prefix"])
def test_swapping_to_host_memory_changes_nothing(llm: LLM, new_llm: Callable[..., LLM], allocator: str) -> None:
    """With swap_space preempted requests are kept on the host and go on where they were: the tokens of an ample pool, and nothing is
    held there at the end."""
    swapping = {"swap_space": 64 * SLOT_BYTES / 2**30, "scheduler": {"plugin": "continuous", "preemption": "swap"}}
    small = new_llm(num_kv_slots=64, max_model_len=64, allocator=allocator, **swapping)
    assert small.built.pool.num_host_slots == 64 and any("# CPU blocks: 16" in line for line in small.built.pool.log_lines(64))
    seen = Preemptions()
    small.engine.observers.add(seen)
    params = [SamplingParams(seed=1, **HOT), SamplingParams(temperature=0, max_tokens=30)] * 3
    ample, tight = (made.generate(PROMPTS, params, use_tqdm=False) for made in (llm, small))
    assert seen.moved["out"] >= seen.moved["in"] > 0 and seen.most_on_host > 0
    assert [output.outputs for output in tight] == [output.outputs for output in ample]
    assert is_empty(small) and small.engine.kv.usage().host == 0


def test_swap_space_that_nothing_uses_is_told(new_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture) -> None:
    """Where preempted requests are computed again, the log at start says that host memory is of no use, and how it would be."""
    caplog.set_level(logging.INFO, "octavo")
    new_llm(swap_space=0.001)
    assert any("swap_space is unused" in line and "scheduler.preemption = 'swap'" in line for line in caplog.messages)


def test_streams_that_preempt_each_other_have_no_repeat_and_no_hole(new_llm: Callable[..., LLM]) -> None:
    """Read in turns in a pool for little more than one of them (fault 18)."""
    small = new_llm(num_kv_slots=64, max_model_len=64)
    seen = Preemptions()
    params = SamplingParams(seed=1, temperature=4.0, max_tokens=40)
    alone = [output.outputs[0] for prompt in PROMPTS[:3] for output in small.generate(prompt, params, use_tqdm=False)]
    small.engine.observers.add(seen)
    streams = [small.stream(prompt, params) for prompt in PROMPTS[:3]]
    pieces: list[list[Any]] = [[], [], []]
    for turn in itertools.zip_longest(*streams):
        for run, piece in zip(pieces, turn, strict=True):
            run += [] if piece is None else piece.outputs
    assert seen.count > 0
    assert ["".join(piece.text for piece in run) for run in pieces] == [answer.text for answer in alone]
    assert [[token for piece in run for token in piece.token_ids] for run in pieces] == [answer.token_ids for answer in alone]


def test_samples_of_one_request_differ_and_repeat(llm: LLM, new_llm: Callable[..., LLM]) -> None:
    """n = 4 gives four outputs in order, the same ones next time and in a pool that preempts (fault 33)."""
    params = SamplingParams(n=4, seed=7, **HOT)
    first, again = (llm.generate("one", params, use_tqdm=False)[0].outputs for _ in range(2))
    assert first == again
    assert [output.index for output in first] == [0, 1, 2, 3]
    assert len({output.text for output in first}) == 4 and {output.finish_reason for output in first} == {"length"}
    small = new_llm(num_kv_slots=128, max_model_len=64)
    seen = Preemptions()
    small.engine.observers.add(seen)
    outputs = small.generate(["one", "two two"], params, use_tqdm=False)
    assert seen.count > 0 and outputs[0].outputs == first and is_empty(small)


def test_streamed_samples_end_once_each(llm: LLM) -> None:
    """Pieces carry the sample's index; each index has one finish reason, and the last piece of all ends the request (fault 41)."""
    params = SamplingParams(n=3, seed=7, **HOT)
    whole = llm.generate("one", params, use_tqdm=False)[0].outputs
    pieces = list(llm.stream("one", params))
    outputs = [output for piece in pieces for output in piece.outputs]
    for index in range(3):
        mine = [output for output in outputs if output.index == index]
        assert [output.finish_reason for output in mine if output.finish_reason] == ["length"]
        assert "".join(output.text for output in mine) == whole[index].text
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_tiny_temperature_is_greedy(llm: LLM) -> None:
    """1e-6, and 0, and top_k = 1 at any temperature, give the likeliest tokens, without infinities (fault 32)."""
    greedy = answers(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert answers(llm, PROMPTS, SamplingParams(temperature=1e-6, max_tokens=24)) == greedy
    assert answers(llm, PROMPTS, SamplingParams(top_k=1, **HOT)) == greedy
    assert answers(llm, PROMPTS, [SamplingParams(temperature=0, max_tokens=24), SamplingParams(seed=1, **HOT)] * 3)[::2] == greedy[::2]


# ------------------------------------------------------------------------------------------- stops


@pytest.fixture(scope="module")
def ends(shared_llm: LLM) -> tuple[str, list[int]]:
    """A prompt and its 24 greedy tokens, some of which stand at one place only."""
    return "Hello", answers(shared_llm, "Hello", SamplingParams(temperature=0, max_tokens=24))[0]


def test_stop_ids_end_an_output(llm: LLM, ends: tuple[str, list[int]]) -> None:
    """At the first of them; its id belongs to the output, its text only where it was asked for."""
    prompt, token_ids = ends
    stop = token_ids[9]
    end = token_ids.index(stop) + 1
    for include in (False, True):
        params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop], include_stop_str_in_output=include)
        (answer,) = llm.generate(prompt, params, use_tqdm=False)[0].outputs
        assert (answer.finish_reason, answer.stop_reason, answer.token_ids) == ("stop", stop, token_ids[:end])
        assert answer.text == text_of(llm, token_ids[: end if include else end - 1])


def test_min_tokens_hold_stop_ids_back(llm: LLM, ends: tuple[str, list[int]]) -> None:
    """Before that many tokens the stop id is not even sampled (fault 31)."""
    prompt, token_ids = ends
    stop = token_ids[2]
    params = SamplingParams(temperature=0, max_tokens=24, min_tokens=8, stop_token_ids=[stop])
    (made,) = answers(llm, prompt, params)
    assert len(made) >= 8 and stop not in made[:8] and made[:2] == token_ids[:2]
    with pytest.raises(RequestError, match="stop_token_ids holds 384: must be below the vocabulary's size, which is 384"):
        llm.generate(prompt, SamplingParams(stop_token_ids=[384]), use_tqdm=False)


def test_stop_strings_cut_the_text(llm: LLM, ends: tuple[str, list[int]]) -> None:
    """Over several tokens and inside one; streamed, no beginning of it leaks; `include` keeps it; one that never comes changes nothing
    (faults 28, 29, 30)."""
    prompt, token_ids = ends
    text = text_of(llm, token_ids)
    start = len(text) // 2
    stop = text[start : start + 5]
    cut = text.index(stop)
    params = {"temperature": 0, "max_tokens": 24}
    for include in (False, True):
        asked = SamplingParams(**params, stop=[stop, "never to be seen"], include_stop_str_in_output=include)
        (answer,) = llm.generate(prompt, asked, use_tqdm=False)[0].outputs
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.text == text[: cut + (len(stop) if include else 0)]
        pieces = [piece.outputs[0].text for piece in llm.stream(prompt, asked)]
        assert "".join(pieces) == answer.text
    (unstopped,) = llm.generate(prompt, SamplingParams(**params, stop=text[-2:] + "?"), use_tqdm=False)[0].outputs
    assert (unstopped.text, unstopped.finish_reason) == (text, "length")


def test_every_eos_of_the_model_ends_an_output(new_llm: Callable[..., LLM], llm: LLM, ends: tuple[str, list[int]]) -> None:
    """A list in generation_config.json: whichever comes first ends it, unless it is to be ignored (fault 31)."""
    prompt, token_ids = ends
    eos = [token_ids[12], token_ids[6]]
    first = min(token_ids.index(one) for one in eos)
    model = new_llm(tiny("llama_gqa", eos_token_id=eos))
    params = {"temperature": 0, "max_tokens": 24}
    (answer,) = model.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs
    assert (answer.finish_reason, answer.stop_reason, answer.token_ids) == ("stop", None, token_ids[: first + 1])
    assert answer.text == text_of(llm, token_ids[:first])
    assert answers(model, prompt, SamplingParams(**params, ignore_eos=True))[0] == token_ids
    (held,) = answers(model, prompt, SamplingParams(**params, min_tokens=16))
    assert len(held) >= 16 and not set(eos) & set(held[:16])


@pytest.mark.parametrize("seed", range(8))
def test_text_is_what_the_tokenizer_makes_of_the_ids(llm: LLM, seed: int) -> None:
    """Also where an output ends inside a character: bytes that are no character come out as by `decode` (faults 30, 38)."""
    params = SamplingParams(temperature=9.0, seed=seed, max_tokens=37)
    (output,) = llm.generate("한글 😀", params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.text == text_of(llm, answer.token_ids)
    assert "".join(piece.outputs[0].text for piece in llm.stream("한글 😀", params)) == answer.text


def test_special_tokens_are_left_out_unless_wanted(tmp_path: Path, new_llm: Callable[..., LLM], ends: tuple[str, list[int]]) -> None:
    """`skip_special_tokens` decides, as in `decode`."""
    prompt, token_ids = ends
    folder = tmp_path / "special"
    shutil.copytree(tiny("llama_gqa"), folder)
    description = json.loads((folder / "tokenizer.json").read_text())
    content = next(text for text, token_id in description["model"]["vocab"].items() if token_id == token_ids[3])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    description["added_tokens"] = [{"id": token_ids[3], "content": content, "special": True, **flags}]
    (folder / "tokenizer.json").write_text(json.dumps(description))
    model = new_llm(folder)
    for skip in (True, False):
        params = SamplingParams(temperature=0, max_tokens=24, skip_special_tokens=skip)
        (output,) = model.generate({"prompt_token_ids": model.built.loaded.tokenizer.encode(prompt)}, params, use_tqdm=False)
        assert output.outputs[0].token_ids == token_ids
        assert output.outputs[0].text == text_of(model, token_ids, skip_special_tokens=skip)
    assert text_of(model, token_ids) != text_of(model, token_ids, skip_special_tokens=False)
