"""`AsyncLLM`: the tokens of `LLM`, many at once, aborted and failing ones among them, and nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.async_llm import AsyncLLM
from octavo.core.engine import Engine
from octavo.core.errors import EngineError, RequestError
from octavo.core.grammar.compiler import GrammarCompiler
from octavo.core.logprobs import Logprob
from octavo.core.outputs import CompletionOutput, RequestOutput
from octavo.mailbox import Mailbox, joined
from tests.llm.conftest import SETTINGS
from tests.models import PROMPTS

BOUND = 60.0
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def run(test: Coroutine[Any, Any, None]) -> None:
    """In an event loop of its own, within a bound."""
    asyncio.run(asyncio.wait_for(test, BOUND))


@pytest.fixture
def opened(folder: Path) -> Callable[..., Any]:
    """An AsyncLLM in an `async with`; it must be empty at the end."""

    @asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[AsyncLLM]:
        async with AsyncLLM(model=folder, **{"num_kv_slots": 1024, **SETTINGS, **settings}) as llm:
            yield llm
            for _ in range(200):
                if not llm.built.engine.has_work:
                    break
                await asyncio.sleep(0.01)
            usage = llm.built.engine.kv.usage()
            assert not llm.built.engine.requests and usage.filled == usage.held == 0
            assert not llm._open and not llm._calls and not llm._mailboxes

    return make


async def whole(pieces: AsyncIterator[RequestOutput]) -> tuple[list[int], str, str | None]:
    ids, text, reason = list[int](), "", None
    async for piece in pieces:
        (new,) = piece.outputs
        ids += new.token_ids
        text += new.text
        reason = new.finish_reason or reason
    return ids, text, reason


def test_many_at_once_give_the_tokens_of_llm(opened: Any, llm: LLM) -> None:
    """Streamed and whole, all at the same time: equal to LLM's answers, each to its own asker."""
    expected = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY, use_tqdm=False)

    async def test() -> None:
        async with opened() as served:
            calls = [
                whole(served.generate({"prompt_token_ids": list(prompt)}, GREEDY, stream=stream))
                for prompt in PROMPTS
                for stream in (True, False)
            ]
            answers = await asyncio.gather(*calls)
            for number, output in enumerate(expected):
                wanted = (output.outputs[0].token_ids, output.outputs[0].text, output.outputs[0].finish_reason)
                assert answers[2 * number] == answers[2 * number + 1] == wanted

    run(test())


def test_chat_renders_the_template(opened: Any, llm: LLM) -> None:
    """The same conversation gives the same answer as LLM.chat."""
    messages = [{"role": "user", "content": "Hello"}]
    (expected,) = llm.chat(messages, GREEDY, use_tqdm=False)

    async def test() -> None:
        async with opened() as served:
            assert (await whole(served.chat(messages, GREEDY)))[0] == expected.outputs[0].token_ids

    run(test())


def test_a_bad_request_fails_alone(opened: Any) -> None:
    """RequestError reaches its asker, others go on."""

    async def test() -> None:
        async with opened() as served:
            bad = whole(served.generate({"prompt_token_ids": [10**6]}, GREEDY))
            good = whole(served.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY))
            failed, answer = await asyncio.gather(bad, good, return_exceptions=True)
            assert isinstance(failed, RequestError) and failed.field == "prompt"
            assert isinstance(answer, tuple) and len(answer[0]) == 12

    run(test())


def test_what_is_no_request_is_refused(opened: Any) -> None:
    """As by `LLM`: wrong types, and arguments that nobody knows, which might be misspelt ones."""
    ids = {"prompt_token_ids": [1, 2, 3]}

    async def test() -> None:
        async with opened() as served:
            for params in ({}, {"temperature": 0}, 5):
                with pytest.raises(RequestError, match=r"^sampling_params must be SamplingParams, not "):
                    await whole(served.generate(ids, params))
            with pytest.raises(RequestError, match=r"^messages must be a list of messages, not NoneType$"):
                await whole(served.chat(None))
            for request_id in ([], 5):
                with pytest.raises(RequestError, match=r"^request_id must be text, not "):
                    await whole(served.generate(ids, GREEDY, request_id=request_id))
            with pytest.raises(TypeError, match=r"^unexpected keyword argument 'prioritee'$"):
                await whole(served.generate(ids, GREEDY, prioritee=1))
            assert len((await whole(served.generate(ids, GREEDY)))[0]) == 12

    run(test())


def test_an_event_loop_that_ended_without_a_close(folder: Path) -> None:
    """Nobody listens any more: the engine's thread finishes its work, instead of dying of it."""
    ended = threading.Event()

    async def begin() -> AsyncLLM:
        served = AsyncLLM(model=folder, num_kv_slots=1024, **SETTINGS)
        mailbox = Mailbox(served._event_loop())

        def add(engine: Engine) -> None:
            ended.wait(BOUND)
            served._mailboxes[engine.add_request([1, 2, 3], GREEDY, stream=True).id] = mailbox

        served.engine_loop.post(add)
        return served

    served = asyncio.run(begin())
    ended.set()
    asyncio.run(asyncio.wait_for(asyncio.to_thread(_wait_until_idle, served), BOUND))
    assert served.engine_loop.alive
    assert served.engine_loop.stop(BOUND)
    served.built.engine.close()


def _wait_until_idle(served: AsyncLLM) -> None:
    done = threading.Event()
    while served.engine_loop.alive and not done.wait(0.01):
        served.engine_loop.post(lambda engine: None if engine.has_work else done.set())


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_aborts_within_two_steps(opened: Any, stream: bool) -> None:
    """Whoever stops reading, or is cancelled before anything came, leaves no request in the engine."""
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    async def test() -> None:
        async with opened() as served:
            steps: list[int] = []
            served.built.engine.observers.add(_Counter(steps))
            if stream:
                async with aclosing(served.generate({"prompt_token_ids": [1, 2, 3]}, long)) as pieces:
                    async for _ in pieces:
                        break
            else:
                task = asyncio.create_task(whole(served.generate({"prompt_token_ids": [1, 2, 3]}, long, stream=False)))
                while not steps:
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            at = len(steps)
            while served.built.engine.requests:
                await asyncio.sleep(0.001)
            assert len(steps) - at <= 2

    run(test())


def test_leaving_after_the_end_spares_the_next_of_that_name(opened: Any) -> None:
    """Who leaves before reading its last piece aborts nobody: the id may be another request's by then."""

    async def test() -> None:
        async with opened() as served:
            async with aclosing(served.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY, request_id="mine")) as pieces:
                async for _ in pieces:
                    break
                while served.built.engine.requests or served._mailboxes:
                    await asyncio.sleep(0.001)
                held = asyncio.Event()
                long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
                other = asyncio.create_task(_count(served.generate({"prompt_token_ids": [4, 5]}, long, request_id="mine"), held))
                await held.wait()
            assert await other == (100, "length")

    run(test())


async def _count(pieces: AsyncIterator[RequestOutput], held: asyncio.Event) -> tuple[int, str | None]:
    """How many tokens came, and the end; `held` is set by the first piece."""
    count, reason = 0, None
    async for piece in pieces:
        held.set()
        count += len(piece.outputs[0].token_ids)
        reason = piece.outputs[0].finish_reason or reason
    return count, reason


def test_grammars_are_compiled_beside_the_engine(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new grammar takes its time in a thread of its own: the engine's finds it compiled. One that cannot be is refused."""

    async def test() -> None:
        async with opened() as served:
            threads = list[str]()
            compile_new = GrammarCompiler._compile

            def watched(self: GrammarCompiler, *given: Any) -> Any:
                threads.append(threading.current_thread().name)
                return compile_new(self, *given)

            monkeypatch.setattr(GrammarCompiler, "_compile", watched)
            params = SamplingParams(temperature=0, max_tokens=12, structured_outputs={"regex": "[ab]{3}"})
            _, text, _ = await whole(served.generate({"prompt_token_ids": [1, 2, 3]}, params))
            assert set(text) <= {"a", "b"} and len(text) == 3
            assert len(threads) == 1 and threads[0] != "octavo-engine"
            bad = SamplingParams(structured_outputs={"regex": "(["})
            with pytest.raises(RequestError, match="structured_outputs"):
                await whole(served.generate({"prompt_token_ids": [1, 2, 3]}, bad))

    run(test())


class Deadly(BaseException):
    """No thread survives it."""


def test_what_fails_between_steps_kills_nobody(opened: Any) -> None:
    """An action that raises is logged; whoever is in the engine is answered."""

    async def test() -> None:
        async with opened() as served:
            reader = asyncio.create_task(whole(served.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY)))
            served.engine_loop.post(lambda engine: 1 / 0)
            assert len((await reader)[0]) == 12
            assert served.engine_loop.alive

    run(test())


class _Counter:
    def __init__(self, steps: list[int]) -> None:
        self._steps = steps

    def octavo_step_finished(self, report: Any) -> None:
        self._steps.append(report.step)


def test_abort_ends_with_what_there_is(opened: Any) -> None:
    """The reader gets a last piece that says abort."""

    async def test() -> None:
        async with opened() as served:
            long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
            reason = None
            async for piece in served.generate({"prompt_token_ids": [1, 2, 3]}, long, request_id="mine"):
                reason = piece.outputs[0].finish_reason or reason
                await served.abort("mine")
            assert reason == "abort"
            await served.abort("nobody")

    run(test())


def test_death_reaches_everybody(opened: Any) -> None:
    """Readers and callers of a dying engine get an EngineError, later ones at once, and `on_death` is told."""

    async def test() -> None:
        async with opened() as served:
            deaths: list[BaseException] = []
            served.on_death = deaths.append
            long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
            readers = [asyncio.create_task(whole(served.generate({"prompt_token_ids": [1, 2, 3]}, long, stream=s))) for s in (True, False)]
            await asyncio.sleep(0.01)

            def die(engine: Any) -> None:
                raise Deadly("broken on purpose")

            served.engine_loop.post(die)
            asked = asyncio.create_task(served.call(lambda engine: len(engine.requests)))
            for task in (*readers, asked):
                with pytest.raises(EngineError, match="the engine has stopped"):
                    await task
            with pytest.raises(EngineError, match="the engine has stopped: broken on purpose"):
                await whole(served.generate({"prompt_token_ids": [1, 2, 3]}, long))
            assert [str(error) for error in deaths] == ["broken on purpose"]
            for request_id in list(served.built.engine.requests):
                served.built.engine.abort(request_id)

    run(test())


def test_call_looks_at_the_engine(opened: Any) -> None:
    """Its result, or its error, comes back."""

    async def test() -> None:
        async with opened() as served:
            assert await served.call(lambda engine: engine.max_model_len) == 128
            with pytest.raises(ZeroDivisionError):
                await served.call(lambda engine: 1 / 0)

    run(test())


def piece(index: int, text: str, ids: list[int], reason: str | None = None, *, finished: bool = False) -> RequestOutput:
    logprobs = [{token: Logprob(-1.0, 1, None)} for token in ids]
    return RequestOutput("r", None, [], [CompletionOutput(index, text, ids, reason, logprobs=logprobs)], finished=finished)


def test_pieces_that_wait_are_joined_by_sample() -> None:
    """Text, ids and logprobs add up; each index ends once; the last of all is the finished one."""
    pieces = [piece(0, "a", [1]), piece(1, "x", [7]), piece(0, "b", [2], "stop"), piece(1, "y", [8], "length", finished=True)]
    first, second = joined(pieces)
    assert (first.outputs[0].text, first.outputs[0].token_ids, first.outputs[0].finish_reason, first.finished) == (
        "ab",
        [1, 2],
        "stop",
        False,
    )
    assert (second.outputs[0].text, second.outputs[0].token_ids, second.outputs[0].finish_reason) == ("xy", [7, 8], "length")
    assert second.finished
    assert [list(entry) for entry in first.outputs[0].logprobs or []] == [[1], [2]]


def test_the_last_piece_is_finished_even_if_another_sample_began_later() -> None:
    """Joined into a piece that stands first, the end still comes last."""
    first, second = joined([piece(0, "a", [1]), piece(1, "x", [7], "stop"), piece(0, "b", [2], "stop", finished=True)])
    assert (first.outputs[0].text, first.finished, second.finished) == ("ab", False, True)


def test_who_comes_after_all_was_given_up_is_told_too(opened: Callable[..., Any]) -> None:
    """While the engine's thread hangs a request that was on its way does not wait for it."""

    async def test() -> None:
        async with opened() as llm:
            hanging, begun = threading.Event(), threading.Event()
            llm.engine_loop.post(lambda engine: begun.set() or (hanging.wait(BOUND) and None))
            assert await asyncio.to_thread(begun.wait, BOUND)
            llm.fail_all("a step hangs")
            try:
                with pytest.raises(EngineError, match="a step hangs"):
                    await asyncio.wait_for(anext(llm.generate({"prompt_token_ids": [1, 2]}, GREEDY)), 10)
                with pytest.raises(EngineError, match="a step hangs"):
                    await asyncio.wait_for(llm.call(lambda engine: 1), 10)
            finally:
                hanging.set()

    run(test())
