"""`LLM`: what its calls take, in which order answers come, what is refused, and that nothing stays behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from octavo import LLM, SamplingParams
from octavo.core.assembly import build_engine, load_model
from octavo.core.errors import EngineError, RequestError
from octavo.core.outputs import RequestOutput
from octavo.core.registry import Registry
from octavo.core.settings.config import load_config
from octavo.core.settings.flat import from_flat
from tests.llm.conftest import SETTINGS, is_empty
from tests.models import PROMPTS, reference_tokens, tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ------------------------------------------------------------------------------------------- prompts and outputs


def test_an_output_has_the_parts_that_people_know(llm: LLM) -> None:
    """Text, ids, finish reason, the prompt and its ids; text is what the tokenizer makes of the ids."""
    (output,) = llm.generate("Hello", GREEDY, use_tqdm=False)
    tokenizer = llm.built.loaded.tokenizer
    (answer,) = output.outputs
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("Hello", tokenizer.encode("Hello"), True)
    assert (len(answer.token_ids), answer.finish_reason, answer.index) == (12, "length", 0)
    assert answer.text == tokenizer.decode(answer.token_ids) != ""


def test_prompts_may_be_text_or_ids_one_or_many_or_mixed(llm: LLM) -> None:
    """All spellings of a prompt give the same tokens."""
    token_ids = llm.built.loaded.tokenizer.encode("Hello")
    spellings: list[Any] = ["Hello", {"prompt": "Hello"}, {"prompt_token_ids": token_ids}, {"prompt_token_ids": tuple(token_ids)}]
    together = llm.generate(spellings, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == ["Hello", "Hello", None, None]
    alone = [llm.generate(spelling, GREEDY, use_tqdm=False) for spelling in [*spellings, tuple(spellings[:1]), iter(spellings[:1])]]
    assert all(len(outputs) == 1 for outputs in alone)
    assert {tuple(made) for outputs in [together, *alone] for made in ids(outputs)} == {tuple(ids(together)[0])}


def test_tokens_are_those_of_transformers_through_the_shared_engine(llm: LLM) -> None:
    """The prompts of all lengths in one call."""
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], GREEDY, use_tqdm=False)
    assert tuple(map(tuple, ids(outputs))) == reference_tokens(tiny("llama_gqa"), PROMPTS, 12)


def test_long_prompts_go_first_and_answers_come_in_order(llm: LLM) -> None:
    """Requests are numbered in the order in which they were sent: by length, the longest first (S7)."""
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    shuffled = [prompts[i] for i in (2, 5, 0, 4, 1, 3)]
    outputs = llm.generate(shuffled, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [prompt["prompt_token_ids"] for prompt in shuffled]
    by_number = sorted(outputs, key=lambda output: int(output.request_id.partition("-")[2]))
    assert [len(output.prompt_token_ids) for output in by_number] == [33, 17, 16, 11, 5, 1]


def test_params_for_all_or_for_each(llm: LLM) -> None:
    """One for all, a list with one for each, or none: then 16 tokens (fault 25)."""
    each = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 1, 2)]
    assert [len(made) for made in ids(llm.generate(["a", "bbb", "cc"], each, use_tqdm=False))] == [3, 1, 2]
    assert [len(made) for made in ids(llm.generate(["a", "b"], use_tqdm=False))] == [16, 16]


def test_no_prompts_no_outputs(llm: LLM) -> None:
    """An empty list is fine, also with an empty list of params."""
    assert llm.generate([], GREEDY) == llm.generate([], []) == []


def test_progress_bar_only_where_wanted(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, with tokens a second."""
    llm.generate(["a", "b"], GREEDY)
    printed = capsys.readouterr()
    assert "Processed prompts: 100%" in printed.err and "2/2" in printed.err and "output tok/s" in printed.err
    assert printed.out == ""
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_priority_user_and_class_for_all_and_for_each(new_llm: Callable[..., LLM]) -> None:
    """Keywords go for all prompts, a prompt's mapping overrides them; priority decides who is served first (S5)."""
    llm = new_llm(scheduler={"plugin": "continuous", "order": "priority", "classes": {"batch": {"max_running": 1}}}, max_num_seqs=1)
    prompts = ["a", {"prompt": "b", "priority": -1, "user": "eve", "class": "default"}]
    late, early = llm.generate(prompts, GREEDY, use_tqdm=False, priority=1, user="bob", **{"class": "batch"})
    assert [(output.user, output.class_name) for output in (late, early)] == [("bob", "batch"), ("eve", "default")]
    assert early.times.finished < late.times.first_scheduled


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "a prompt is text, or a mapping like {'prompt_token_ids': [1, 2]} for token ids, not NoneType"),
        (7, "for token ids, not int"),
        (b"abc", "for token ids, not bytes"),
        ([1, 2, 3], "prompt 0: a prompt is text, or a mapping like {'prompt_token_ids': [1, 2]} for token ids, not int"),
        ([[1, 2], [3]], "prompt 0: a prompt is text, or a mapping like {'prompt_token_ids': [1, 2]} for token ids, not list"),
        (["a", None], "prompt 1: a prompt is text, or a mapping like {'prompt_token_ids': [1, 2]} for token ids, not NoneType"),
        (["a", {}], "prompt 1: a prompt's mapping needs exactly one of 'prompt' and 'prompt_token_ids'"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "needs exactly one of 'prompt' and 'prompt_token_ids'"),
        ({"prompt": "a", "prio": 1}, "unknown key 'prio' in a prompt; known: prompt, prompt_token_ids, priority, class, user"),
        ([{"role": "user", "content": "Hi"}], "class, user; messages go to chat()"),
        ({"prompt": 5}, "prompt must be a string, not int"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids must be a list of whole numbers"),
        ({"prompt_token_ids": b"12"}, "prompt_token_ids must be a list of whole numbers"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids must be a list of whole numbers"),
        ({"prompt_token_ids": [1, 2.0]}, "prompt_token_ids must be a list of whole numbers"),
        (["a", ""], "prompt 1: the prompt is empty: give at least one token"),
        ({"prompt_token_ids": []}, "the prompt is empty: give at least one token"),
        (["a", {"prompt_token_ids": [3, 384]}], "prompt 1: prompt token id 384 is outside the vocabulary (0..383)"),
        ({"prompt_token_ids": [-1]}, "prompt token id -1 is outside the vocabulary"),
        (["a", "b" * 128], "prompt 1: the prompt has 128 tokens, max_model_len is 128 and one must be left to answer"),
        (["a", "b" * 120], "prompt 1: 120 prompt tokens + max_tokens 12 = 132 exceed max_model_len 128: ask for at most 8"),
        ({"prompt": "a", "priority": "high"}, "priority must be a whole number, not 'high'"),
        ({"prompt": "a", "user": 5}, "user must be text, not 5"),
        ({"prompt": "a", "priority": 10**5000}, "priority must be between -2147483647 and 2147483647, not <int that cannot be shown>"),
        ({"prompt": "a", 10**5000: 1}, "unknown key '<int that cannot be shown>' in a prompt"),
        ({"prompt_token_ids": [10**5000]}, "prompt token id <int that cannot be shown> is outside the vocabulary"),
        ("a\ud800", "prompt holds half a surrogate pair, U+D800, at character 1"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(llm: LLM, prompts: Any, message: str) -> None:
    """The message says which prompt and why, nothing of the batch was run, and the engine lives on (faults 19, 23, 24, 26)."""
    steps = []
    observer = type("Counts", (), {"octavo_step_finished": lambda self, report: steps.append(report)})()
    llm.engine.observers.add(observer)
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert message in str(error.value)
    llm.engine.observers.remove(observer)
    assert steps == [] and is_empty(llm)
    assert len(llm.generate("still alive", GREEDY, use_tqdm=False)) == 1


def test_wrong_params_are_refused(llm: LLM) -> None:
    """Too few, too many, or no SamplingParams at all."""
    for prompts, params, message in [
        (["a", "b"], [GREEDY], "2 prompts but 1 sampling params: give one for all, or one for each"),
        (["a"], [], "1 prompts but 0 sampling params"),
        (["a", "b"], {"temperature": 0}, "sampling_params must be SamplingParams, or a list of one for each prompt, not dict"),
        (["a", "b"], [GREEDY, None], "sampling_params must be SamplingParams, or a list of one for each prompt, not NoneType"),
    ]:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        llm.generate("a", temperature="0")


def test_class_limits_refuse_the_whole_batch(new_llm: Callable[..., LLM]) -> None:
    """A prompt over its class's limit is named, its batch mates are withdrawn (S6)."""
    llm = new_llm(scheduler={"plugin": "continuous", "classes": {"batch": {"max_input_tokens": 4}}})
    with pytest.raises(RequestError, match=r"^prompt 1: .*5.*4"):
        llm.generate(["four", "fives"], GREEDY, use_tqdm=False, **{"class": "batch"})
    assert is_empty(llm)
    assert len(llm.generate(["four", {"prompt": "fives", "class": "default"}], GREEDY, use_tqdm=False, **{"class": "batch"})) == 2


def test_a_model_without_tokenizer_takes_token_ids(tmp_path: Path, llm: LLM) -> None:
    """Text is refused with what to do, ids are served, without text; stop strings can't be."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny("llama_gqa").iterdir():
        if file.name != "tokenizer.json":
            (bare / file.name).symlink_to(file)
    source = replace(llm.built.loaded.source, path=bare)  # as a caller gives one that loads no text: names lead to whole folders only
    registry = Registry.discover()
    config = load_config(registry, overrides=from_flat(**SETTINGS))
    with LLM.from_built(build_engine(registry, config, load_model(registry, config, source=source))) as textless:
        with pytest.raises(RequestError, match=r"bare has no tokenizer\.json: give prompt_token_ids"):
            textless.generate("text", GREEDY, use_tqdm=False)
        (output,) = textless.generate({"prompt_token_ids": list(PROMPTS[1])}, GREEDY, use_tqdm=False)
        assert tuple(output.outputs[0].token_ids) == reference_tokens(tiny("llama_gqa"), PROMPTS[1:2], 12)[0]
        assert output.outputs[0].text == ""
        with pytest.raises(RequestError, match="stop strings need a tokenizer"):
            textless.generate({"prompt_token_ids": [1]}, SamplingParams(stop="x"), use_tqdm=False)
        assert is_empty(textless)


# ------------------------------------------------------------------------------------------- nothing stays behind


@pytest.mark.parametrize("where", ["at the start of a step", "in the forward pass", "after a step"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_nothing(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    """Ctrl-C and errors end the call wherever they come; the pool is empty, and the next call gives the right tokens (faults 12, 13)."""
    llm = new_llm()
    prompts = ["one", "two two", "three three three"]
    before = texts(llm.generate(prompts, GREEDY, use_tqdm=False))
    calls = 0

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise error("in mid-run")
            return original(*args, **kwargs)

        return call

    owner, name = {
        "at the start of a step": (llm.engine.scheduler, "schedule"),
        "in the forward pass": (llm.engine.runner.model, "forward"),
        "after a step": (llm.engine, "_tell"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name)))
        with pytest.raises(error, match="in mid-run"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    assert calls == 4 and is_empty(llm) and llm._inboxes == {}
    assert texts(llm.generate(prompts, GREEDY, use_tqdm=False)) == before


def test_close_twice_and_use_after(new_llm: Callable[..., LLM]) -> None:
    """Closing again is fine, using it is an error that says so, and memory is let go of."""
    llm = new_llm()
    runner = llm.engine.runner
    with llm as entered:
        assert entered is llm
    llm.close()
    assert runner.tensors.device == []
    for use in (
        lambda: llm.generate("a"),
        lambda: llm.generate([]),
        lambda: llm.engine,
        lambda: next(llm.stream("a")),
        lambda: llm.chat([]),
    ):
        with pytest.raises(EngineError, match="this LLM is closed: make a new one"):
            use()


def test_leaving_a_with_block_by_an_error_closes(new_llm: Callable[..., LLM]) -> None:
    """The error comes through."""
    llm = new_llm()
    with pytest.raises(ZeroDivisionError), llm:
        raise ZeroDivisionError
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a")


# ------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("prompt", ["Hello there", "안녕하세요 😀"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=3.0, seed=5, max_tokens=40)])
def test_pieces_joined_are_the_answer(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Text and ids of a stream are those of `generate`; only the last piece says that it is over (fault 38)."""
    (whole,) = llm.generate(prompt, params, use_tqdm=False)
    pieces = list(llm.stream(prompt, params))
    assert "".join(texts(pieces)) == texts([whole])[0] == llm.built.loaded.tokenizer.decode(ids([whole])[0])
    assert [token for made in ids(pieces) for token in made] == ids([whole])[0]
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].outputs[0].finish_reason == "length" and len(pieces) > 5


def test_stream_takes_what_generate_takes(llm: LLM, new_llm: Callable[..., LLM]) -> None:
    """A mapping with class and user of its own, 16 tokens without params, the rest of the context for a conversation."""
    pieces = list(llm.stream({"prompt": "abc", "user": "eve"}))
    assert sum(map(len, ids(pieces))) == 16 and {piece.user for piece in pieces} == {"eve"}
    conversation = [{"role": "user", "content": "Hi"}]
    length = len(llm.built.loaded.tokenizer.encode_chat(conversation))
    assert sum(map(len, ids(list(llm.stream(conversation))))) == 128 - length
    for prompt, message in [("", "the prompt is empty"), ([], "messages is empty"), (5, "messages must be a list of messages, not int")]:
        with pytest.raises(RequestError, match=message):
            next(llm.stream(prompt))  # type: ignore[arg-type]


def test_an_abandoned_stream_is_aborted(llm: LLM) -> None:
    """Breaking out of the loop, or forgetting the generator, gives its slots back at once (fault 11)."""
    for piece in llm.stream("Hello", GREEDY):
        assert not piece.finished
        break
    assert is_empty(llm)
    pieces = llm.stream("Hello", GREEDY)
    next(pieces)
    assert not is_empty(llm)
    pieces.close()  # type: ignore[attr-defined]
    assert is_empty(llm)
    pieces = llm.stream("never started", GREEDY)
    del pieces
    assert is_empty(llm) and llm._inboxes == {}


def test_calls_in_between_take_nothing_from_a_stream(llm: LLM) -> None:
    """Two streams and `generate` in turns: each has all of its own pieces, also those made while another call stepped."""
    alone = {prompt: texts(llm.generate(prompt, GREEDY, use_tqdm=False))[0] for prompt in ("one", "two two", "three")}
    first, second = llm.stream("one", GREEDY), llm.stream("two two", GREEDY)
    begun = [next(first), next(second)]
    assert texts(llm.generate("three", GREEDY, use_tqdm=False)) == [alone["three"]]
    rest = [list(first), list(second)]
    joined = ["".join(texts([piece, *pieces])) for piece, pieces in zip(begun, rest, strict=True)]
    assert joined == [alone["one"], alone["two two"]]


def test_closing_under_a_stream_is_an_error_there(new_llm: Callable[..., LLM]) -> None:
    """It does not wait for ever for what cannot come (fault 42)."""
    llm = new_llm()
    pieces = llm.stream("Hello", GREEDY)
    next(pieces)
    llm.close()
    with pytest.raises(EngineError, match="this LLM is closed"):
        list(pieces)


def test_a_batching_window_is_slept_through(new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that waits for company is asked again when the time has come, and not over and over until then."""
    llm = new_llm(scheduler={"plugin": "static", "window_s": 0.05})
    steps, step = [], llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: steps.append(1) or step())
    (output,) = llm.generate("Hello", GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12 and len(steps) <= 15
    assert output.times.first_scheduled - output.times.arrival >= 0.05


# ------------------------------------------------------------------------------------------- chat


def test_chat_renders_the_models_template(llm: LLM) -> None:
    """One conversation or many; the answer is that to the rendered prompt."""
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    other = [{"role": "user", "content": "안녕"}]
    (alone,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert alone.prompt == "<system>Be brief.\n<user>Hi\n<assistant>"
    assert ids([alone]) == ids(llm.generate(alone.prompt, GREEDY, use_tqdm=False))
    both = llm.chat([conversation, tuple(other)], [GREEDY, SamplingParams(temperature=0, max_tokens=2)], use_tqdm=False)
    assert [output.prompt for output in both] == [alone.prompt, "<user>안녕\n<assistant>"]
    assert ids(both)[0] == ids([alone])[0] and len(ids(both)[1]) == 2


def test_chat_adds_no_second_bos(tmp_path: Path, new_llm: Callable[..., LLM]) -> None:
    """A template writes BOS itself; the tokenizer's own goes before plain prompts only."""
    folder = tmp_path / "bos"
    shutil.copytree(tiny("llama_gqa"), folder)
    (folder / "chat_template.jinja").write_text("! {{ messages[0].content }}")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="! $A", special_tokens=[("!", backend.token_to_id("!"))])
    backend.save(str(folder / "tokenizer.json"))
    llm = new_llm(folder)
    (plain,) = llm.generate("Hi", GREEDY, use_tqdm=False)
    (chat,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)
    (piece, *_) = llm.stream([{"role": "user", "content": "Hi"}], GREEDY)
    bos = backend.token_to_id("!")
    assert plain.prompt_token_ids.count(bos) == chat.prompt_token_ids.count(bos) == 1
    assert piece.outputs[0].token_ids == chat.outputs[0].token_ids[:1]


def test_chat_without_params_may_use_the_rest_of_the_context(llm: LLM) -> None:
    """And 16 tokens where params are given that say nothing (fault 25)."""
    conversation = [{"role": "user", "content": "Hi"}]
    (rest,) = llm.chat(conversation, use_tqdm=False)
    assert len(rest.prompt_token_ids) + len(rest.outputs[0].token_ids) == 128
    (some,) = llm.chat(conversation, SamplingParams(temperature=0), use_tqdm=False)
    assert len(some.outputs[0].token_ids) == 16


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty: send at least one message"),
        (None, "messages must be a list of messages, not NoneType"),
        ("Hi", "messages must be a list of messages, not str"),
        ({"role": "user", "content": "Hi"}, "messages must be a list of messages, not dict"),
        (["Hi"], "messages must be a list of messages, not str"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([[{"role": "user", "content": "a"}], [{"content": "b"}]], "conversation 1: messages[0].role must be a string"),
        ([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b" * 200}]], "conversation 1: the prompt has 218 tokens"),
    ],
)
def test_wrong_conversations_are_named(llm: LLM, messages: Any, message: str) -> None:
    """As for prompts."""
    with pytest.raises(RequestError) as error:
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert message in str(error.value)


def test_a_model_without_template_says_so(new_llm: Callable[..., LLM]) -> None:
    """Plain prompts still work."""
    llm = new_llm(tiny("llama_gqa"))
    with pytest.raises(RequestError, match="this model has no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)
    assert len(llm.generate("Hi", GREEDY, use_tqdm=False)) == 1


def test_answers_of_refused_and_abandoned_calls_are_not_kept(llm: LLM) -> None:
    """Nobody will ask for them: a client that keeps being refused costs no memory."""
    good = {"prompt_token_ids": [1, 2, 3]}
    for _ in range(20):
        with pytest.raises(RequestError):
            llm.generate([good, {**good, "class": "none such"}], use_tqdm=False)
    stream = llm.stream(good, SamplingParams(temperature=0, max_tokens=8))
    next(stream)
    stream.close()
    assert not llm.engine.requests and not llm.engine.has_work


def test_a_step_within_a_step_is_refused(llm: LLM) -> None:
    """A user's function that steps the engine fails its own request, rather than undo the step that it is part of for ever."""

    def steps(output: list[int], logits: Any) -> Any:
        llm.engine.step()
        return logits

    params = [GREEDY, replace(GREEDY, logits_processors=(steps,))]
    plain, stepping = llm.generate(["a", "b"], params, use_tqdm=False)
    assert plain.outputs[0].finish_reason == "length"
    assert "a step runs already" in (stepping.outputs[0].error or "")


def test_what_a_users_function_spoils_is_not_the_models_fault(llm: LLM) -> None:
    """NaN out of a logits processor is told as such."""
    params = replace(GREEDY, logits_processors=(lambda output, logits: logits.fill_(float("nan")),))
    (answer,) = llm.generate("a", params, use_tqdm=False)
    assert answer.outputs[0].error == "logits_processors returned NaN or infinity, or the model gave it: no token can be chosen"


def test_a_step_from_outside_does_not_make_a_stream_wait_for_ever(llm: LLM) -> None:
    """Whoever steps the engine itself takes the outputs; the stream says so."""
    stream = llm.stream({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    next(stream)
    while llm.engine.has_work:
        llm.engine.step()
    with pytest.raises(EngineError, match=r"was engine\.step\(\) called from outside"):
        next(stream)
