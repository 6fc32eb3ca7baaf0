"""Calls without params sample as the model's generation_config.json says, unless the settings forbid it; given params stay as they are."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.async_llm import AsyncLLM
from octavo.core.outputs import RequestOutput
from tests.llm.conftest import SETTINGS

DEFAULTS = {"temperature": 0.3, "top_k": 3, "top_p": 0.9, "max_tokens": 24}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def opinionated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a generation config, one value of which is wrong."""
    copy = tmp_path_factory.mktemp("opinionated") / "model"
    shutil.copytree(folder, copy)
    own = {"temperature": 0.3, "top_k": 3, "top_p": 0.9, "min_p": "much", "max_new_tokens": 24, "do_sample": False}
    (copy / "generation_config.json").write_text(json.dumps(own))
    return copy


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_calls_without_params_use_the_models_defaults(
    new_llm: Callable[..., LLM], opinionated: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """generate, chat and stream; one line at start names them and the file, a warning the value that cannot be used."""
    with caplog.at_level(logging.INFO, logger="octavo"):
        llm = new_llm(opinionated)
    said = [record.getMessage() for record in caplog.records]
    lines = [line for line in said if line.startswith("sampling defaults: ")]
    assert len(lines) == 1 and "temperature = 0.3" in lines[0] and str(opinionated / "generation_config.json") in lines[0]
    assert sum("min_p = 'much'" in line for line in said) == 1
    assert llm.get_default_sampling_params() == SamplingParams(**DEFAULTS)
    assert dict(llm.built.default_sampling) == DEFAULTS

    def asked(llm: LLM, params: SamplingParams | None) -> list[Any]:
        generated = ids(llm.generate(["one", "two"], params, use_tqdm=False))
        chatted = ids(llm.chat(MESSAGES, params, use_tqdm=False))
        streamed = [token for piece in llm.stream("three", params) for token in piece.outputs[0].token_ids]
        return [generated, chatted, streamed]

    found = asked(llm, None)
    assert found == asked(new_llm(opinionated), SamplingParams(**DEFAULTS))  # the same running numbers, hence the same seeds
    assert found != asked(new_llm(opinionated), SamplingParams(max_tokens=24))
    assert [len(tokens) for tokens in (*found[0], *found[1], found[2])] == [24] * 4


def test_given_params_are_taken_as_they_are(new_llm: Callable[..., LLM], opinionated: Path) -> None:
    """Nothing of the file is mixed into them: temperature 1 and 16 tokens."""
    params = SamplingParams(seed=5)
    found = ids(new_llm(opinionated).generate("one", params, use_tqdm=False))
    assert found == ids(new_llm(opinionated, generation_config="none").generate("one", params, use_tqdm=False))
    assert len(found[0]) == 16


def test_none_leaves_octavos_own_defaults(new_llm: Callable[..., LLM], opinionated: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file is not asked and no warning comes of it."""
    with caplog.at_level(logging.INFO, logger="octavo"):
        llm = new_llm(opinionated, generation_config="none")
    assert llm.get_default_sampling_params() == SamplingParams()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(ids(llm.generate("one", use_tqdm=False))[0]) == 16


def test_a_default_that_the_context_does_not_hold(new_llm: Callable[..., LLM], opinionated: Path) -> None:
    """A prompt that leaves less than the file's max_new_tokens is answered to the end of the context, not refused."""
    llm = new_llm(opinionated, max_model_len=32)
    output = llm.generate({"prompt_token_ids": [3] * 20}, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (12, "length")


def test_online_calls_too(opinionated: Path) -> None:
    """AsyncLLM uses the same defaults."""

    async def run() -> list[int]:
        async with AsyncLLM(opinionated, num_kv_slots=1024, **SETTINGS) as llm:
            assert llm.get_default_sampling_params() == SamplingParams(**DEFAULTS)
            lengths = []
            async for output in llm.generate("one", stream=False):
                lengths.append(len(output.outputs[0].token_ids))
            async for output in llm.chat(MESSAGES, stream=False):
                lengths.append(len(output.outputs[0].token_ids))
            return lengths

    assert asyncio.run(run()) == [24, 24]
