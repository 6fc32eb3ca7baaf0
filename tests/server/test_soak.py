"""A soak in short: unruly clients, every answer the offline engine's, nothing left over. `make soak` has it at length."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.async_llm import AsyncLLM
from octavo.bench import soak
from octavo.bench.load.unruly import KINDS, Case
from tests.models import VOCAB

REQUESTS = int(os.environ.get("OCTAVO_SOAK_REQUESTS", 800))  # `make soak` sets it


@pytest.fixture(scope="module")
def cases(offline: LLM) -> list[Case]:
    """A few dozen prompts with their answers."""
    prompts = list(soak.case_prompts(24, vocab_size=VOCAB, longest=48))
    params = [SamplingParams(max_tokens=soak.LONGEST, ignore_eos=True, **soak.case_params(number)) for number in range(len(prompts))]
    made = offline.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = [
        Case(prompt, soak.case_params(number), answer.outputs[0].token_ids)
        for number, (prompt, answer) in enumerate(zip(prompts, made, strict=True))
    ]
    assert len({tuple(case.expected) for case in found}) == len(found), "two cases have one answer: a mix-up would not show"
    return found


def run(address: str, cases: list[Case], requests: int, **options: Any) -> soak.Outcome:
    async def main() -> soak.Outcome:
        return await asyncio.wait_for(soak.soak(address, cases, requests=requests, clients=16, model="tiny", **options), 100)

    return asyncio.run(main())


def test_unruly_clients_do_no_harm(address: str, cases: list[Case], engine: AsyncLLM) -> None:
    """A few hundred visits of each kind: no answer is lost or another's, no block is leaked, the metrics agree (faults 11, 44)."""
    outcome = run(address, cases, 300)
    assert outcome.problems == []
    assert set(outcome.visits) == set(KINDS) and sum(outcome.visits.values()) == 300


def test_a_mixed_up_answer_would_be_seen(address: str, cases: list[Case]) -> None:
    """With the answers of two cases exchanged the soak finds problems: it compares."""
    first, second, *rest = cases
    wrong = [Case(first.prompt, first.params, second.expected), Case(second.prompt, second.params, first.expected), *rest]
    problems = run(address, wrong[:2], 40).problems
    assert problems and [problem for problem in problems if "another answer" not in problem] == []


def test_a_wrong_number_would_be_seen(address: str, cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample of /metrics is held against something: moved far enough, one way or the other, it is a problem."""
    asked: list[tuple[Any, Any]] = []
    audit = soak.audit
    monkeypatch.setattr(soak, "audit", lambda *args, **options: asked.append((args, options)) or audit(*args, **options))
    assert run(address, cases, 60).problems == []
    ((before, now, *others), options) = asked[0]
    moved = 0
    for name, values in now.samples.items():
        for labels, value in values.items():
            if not name.startswith("process_"):
                wrong = [replace(now, samples=now.samples | {name: values | {labels: value + by}}) for by in (1e6, -1e6)]
                assert any(audit(before, one, *others, **options) for one in wrong), (name, labels)
                moved += 1
    assert moved > 100
    unknown = replace(now, samples=now.samples | {"new_total": {(): 0.0}}, looked_at=set())
    assert audit(before, unknown, *others, **options) == ["new_total is looked at by no check"]


def test_a_growing_memory_would_be_seen() -> None:
    """Flat in the second half is fine, whatever the first half does; growing is not."""
    for memory, growing in (([*range(50), *[50.0] * 50], False), ([100.0 + number for number in range(100)], True)):
        outcome = soak.Outcome(memory=memory)
        outcome.judge_memory()
        assert bool(outcome.problems) == growing


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_at_length(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From 64 clients to a server in a process of its own: as above, and its memory is flat in the second half."""
    with capsys.disabled():
        assert soak.main(["--model", str(folder), "--requests", str(REQUESTS)]) == 0
