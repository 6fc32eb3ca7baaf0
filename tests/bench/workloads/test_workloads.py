"""Every workload: as many requests as asked for, the same ones for the same seed, and of the kind that its name says."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.arrivals import Arrivals
from octavo.bench.work import Item, Work
from octavo.bench.workloads import WORKLOADS, make_work
from octavo.core.errors import RequestError

SHAREGPT = [
    {"id": f"c{n}", "conversations": [{"from": "human", "value": "question " * (n + 1)}, {"from": "gpt", "value": "answer " * (n + 2)}]}
    for n in range(12)
]


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Options for those that read a file."""
    (tmp_path / "sharegpt.json").write_text(json.dumps(SHAREGPT))
    (tmp_path / "log.csv").write_text("timestamp,input_len,output_len\n" + "".join(f"{n / 4},{20 + n * n},{5 + n}\n" for n in range(20)))
    return {"sharegpt": {"path": str(tmp_path / "sharegpt.json")}, "trace": {"path": str(tmp_path / "log.csv")}}


@pytest.fixture
def make(files: dict[str, dict[str, Any]]) -> Callable[..., Work]:
    def make(name: str, *, count: int = 8, seed: int = 0, **options: Any) -> Work:
        return make_work(name, count=count, seed=seed, vocab_size=1000, options=files.get(name, {}) | options, encode=encode)

    return make


DIGESTS = {
    "random": "9e16a843236eaa04f7f77e836a6b8d807df3990ae1f15721099e984d05698cbe",
    "sharegpt-like": "7355076680e40acc2da23aa1e2e74aa192083edcb9507d763036aab467b0d062",
    "alpaca-like": "5ff0f75c0b520036efab21738503bc5cf58559eaaf7200165c9cfedcf8231a3e",
    "near-limit": "5d8dea0c74b7d5aa096d59109dc5d3d5728acf30b615262dae3a8cde686e4467",
    "sharegpt": "480ff489d14abed651f2690853eb1fe06602b9d258e0182561864b32154900b2",
    "trace": "6399902cf9739512b5580d68c5c45a1ee65e4a9a1fa721ed21aff3fdd4866de4",
    "chat": "7af9e38443e74129f412598314c4c3a1cae3115e1baa68fcf70a2d59bb4f1c6c",
    "agent": "4c347e0508c35bbf041824b3bc1631249cec373d41571240ae7fdce23007a59c",
    "shared-prefix": "4f2e77005b5ff042950d15374ae11635ff6901e75dc67daaf3dee0b9dddb7b7c",
    "rag": "91d22028eb71b78744c6823b0d8ea8b0753f0f2d854672ba5b03caa61e131fb9",
    "long-document": "4d9abb31bab10aec4dac0ed910e77f7e1a913958e7fd7aeee408aca6f2546cf4",
    "rerank-pointwise": "8eae127fa6af9b80afa580d58a0808c58a11131efaac78b12d7c8104d267f318",
    "rerank-listwise": "b750504e41ed34915fa3d5b296526d705b59ac53f419bfad73246293d43f9018",
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_work(make: Callable[..., Work], name: str) -> None:
    """Now, and in the versions to come: results are compared across them. A digest that changes is a change of the workload."""
    assert make(name).digest == make(name).digest == DIGESTS[name]
    assert make(name, seed=1).digest != DIGESTS[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_as_many_as_asked_for(make: Callable[..., Work], name: str) -> None:
    """With ids inside the vocabulary, in the order of their times, and made from what is printed."""
    work = make(name, count=7)
    assert len(work.items) == 7 and work.name == name and work.made_from["workload"] == name
    assert all(0 <= token < 1000 for item in work.items for token in item.prompt)
    assert all(item.after is None or item.after < index for index, item in enumerate(work.items))
    json.dumps(work.made_from)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_rate_spreads_them(files: dict[str, dict[str, Any]], name: str) -> None:
    """All at once without one (a trace has its own times); `arrivals` win over a trace's."""
    options = files.get(name)
    work = make_work(name, count=12, vocab_size=1000, options=options, encode=encode)
    assert max(item.at for item in work.items) == (2.75 if name == "trace" else 0.0)
    rated = make_work(name, count=12, vocab_size=1000, options=options, encode=encode, arrivals=Arrivals(rate=1.0))
    times = [item.at for item in rated.items if item.after is None]
    assert times == sorted(times) and (len(set(times)) > 1 or name == "rerank-pointwise")
    assert rated.made_from["arrivals"] == "1 a second, Poisson"


def lengths(work: Work) -> tuple[list[int], list[int]]:
    return [len(item.prompt) for item in work.items], [item.output_len for item in work.items]


def test_random_lengths(make: Callable[..., Work]) -> None:
    """Fixed, uniform within the ratio, lognormal with mean and variation; all after the common prefix."""
    fixed = make("random", input_len=30, output_len=7)
    assert lengths(fixed) == ([30] * 8, [7] * 8)
    prompts, outputs = lengths(make("random", count=2000, input_len=100, output_len=10, range_ratio=0.3))
    assert (min(prompts), max(prompts), min(outputs), max(outputs)) == (70, 130, 7, 13)
    assert statistics.fmean(prompts) == pytest.approx(100, rel=0.02)
    prompts, outputs = lengths(make("random", count=4000, input_len=100, output_len=50, input_cv=0.5, output_cv=1.0))
    assert statistics.fmean(prompts) == pytest.approx(100, rel=0.05) and statistics.pstdev(prompts) / 100 == pytest.approx(0.5, rel=0.1)
    assert statistics.fmean(outputs) == pytest.approx(50, rel=0.1) and statistics.pstdev(outputs) / 50 == pytest.approx(1.0, rel=0.2)
    prefixed = make("random", input_len=5, prefix_len=6)
    assert len({item.prompt[:6] for item in prefixed.items}) == 1 and len({item.prompt[6:] for item in prefixed.items}) == 8


@pytest.mark.parametrize(("name", "inputs", "outputs"), [("sharegpt-like", 161, 338), ("alpaca-like", 19, 58)])
def test_lengths_like_the_papers(make: Callable[..., Work], name: str, inputs: int, outputs: int) -> None:
    """Means of the PagedAttention paper, output variation 0.87."""
    prompts, made = lengths(make(name, count=6000))
    assert statistics.fmean(prompts) == pytest.approx(inputs, rel=0.05)
    assert statistics.fmean(made) == pytest.approx(outputs, rel=0.05)
    assert statistics.pstdev(made) / statistics.fmean(made) == pytest.approx(0.87, rel=0.1)


def test_near_the_limit(make: Callable[..., Work]) -> None:
    """All within the slack of the context, none beyond."""
    totals = [len(item.prompt) + item.output_len for item in make("near-limit", count=300, context=256, slack=10).items]
    assert (min(totals), max(totals)) == (246, 256)


def chains(work: Work) -> list[list[Item]]:
    found: dict[int, list[Item]] = {}
    head: dict[int, int] = {}
    for index, item in enumerate(work.items):
        head[index] = index if item.after is None else head[item.after]
        found.setdefault(head[index], []).append(item)
    return list(found.values())


@pytest.mark.parametrize(("name", "steps"), [("chat", "turns"), ("agent", "steps")])
def test_conversations(make: Callable[..., Work], name: str, steps: str) -> None:
    """As many turns each, all beginning with the same system prompt, and a pause before each later one."""
    work = make(name, count=30, system_len=9, **{steps: 5})
    talks = chains(work)
    assert [len(talk) for talk in talks] == [5] * 6
    assert len({talk[0].prompt[:9] for talk in talks}) == 1
    assert all(item.pause > 0 and item.at == 0 for talk in talks for item in talk[1:]) and all(talk[0].pause == 0 for talk in talks)
    assert work.prompt_len(4) == sum(len(item.prompt) for item in talks[0]) + sum(item.output_len for item in talks[0][:4])


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_shared_prefixes(make: Callable[..., Work], share: float) -> None:
    """The share asked for begins with one of the prefixes; all prompts are of one length."""
    work = make("shared-prefix", count=200, num_prefixes=3, prefix_len=20, suffix_len=4, share=share)
    heads = [item.prompt[:20] for item in work.items]
    shared = [head for head in heads if heads.count(head) > 1]
    assert len(shared) == 200 * share and len(set(shared)) == (3 if share else 0)
    assert {len(item.prompt) for item in work.items} == {24}


def test_retrieved_documents(make: Callable[..., Work]) -> None:
    """Shuffled, the same documents come in many orders; in the store's order a document stands only before later ones."""
    options = {"count": 50, "documents": 4, "retrieved": 4, "document_len": 8, "system_len": 3}
    shuffled = {item.prompt[3:35] for item in make("rag", **options).items}
    assert len(shuffled) > 10 and len({tuple(sorted(context)) for context in shuffled}) == 1
    assert len({item.prompt[:35] for item in make("rag", **options, shuffled=False).items}) == 1


def test_documents_beside_chats(make: Callable[..., Work]) -> None:
    """One in ten, by class."""
    work = make("long-document", count=40, document_len=300)
    assert [item.class_name for item in work.items].count("document") == 4
    assert {len(item.prompt) for item in work.items if item.class_name == "document"} == {300}
    assert {item.class_name for item in work.items} == {"chat", "document"}


def test_reranking(make: Callable[..., Work]) -> None:
    """B7: 100 short requests at once, which begin with the query, or one long one; bystanders arrive between the queries."""
    options = {"documents": 100, "query_len": 10, "document_len": 5, "output_len": 2}
    points = make("rerank-pointwise", count=100, **options)
    assert len({item.prompt[:10] for item in points.items}) == 1 and lengths(points) == ([15] * 100, [2] * 100)
    (whole,) = make("rerank-listwise", count=1, **options).items
    assert (len(whole.prompt), whole.output_len) == (510, 200)
    assert sum((item.prompt[10:] for item in points.items), points.items[0].prompt[:10]) == whole.prompt
    work = make_work(
        "rerank-pointwise", count=24, vocab_size=1000, arrivals=Arrivals(rate=1, burstiness=float("inf")),
        options={"documents": 10, "bystanders": 2},
    )  # fmt: skip
    arrived = [(item.at, item.class_name) for item in work.items]
    query = [*[(0.0, "rerank")] * 10, (1.0, "chat"), (2.0, "chat")]
    assert arrived == query + [(at + 3, name) for at, name in query]


def test_sharegpt(make: Callable[..., Work], files: dict[str, dict[str, Any]]) -> None:
    """First questions as the tokenizer counts them, as long as their answers; too short ones are left out, and no more than there are."""
    work = make("sharegpt", count=100)
    assert sorted(zip(*lengths(work), strict=True)) == [(n, n + 1) for n in range(4, 13)]
    assert set(work.items[0].prompt) == {8}  # the length of the word `question`, as this tokenizer has it
    assert {item.output_len for item in make("sharegpt", output_len=3).items} == {3}
    with pytest.raises(RequestError, match="ShareGPT's texts need a tokenizer"):
        make_work("sharegpt", count=1, vocab_size=10, options=files["sharegpt"])


def test_a_trace_keeps_its_times(make: Callable[..., Work]) -> None:
    """Scaled if asked for, and lengths within a fifth of the recorded ones."""
    work = make("trace", count=20, time_scale=2.0)
    assert [item.at for item in work.items] == [n / 2 for n in range(20)]
    assert all(abs(len(item.prompt) / (20 + n * n) - 1) < 0.21 for n, item in enumerate(work.items))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("radom", {}, r"there is no workload 'radom' \(did you mean random\?\); there are: random, "),
        ("random", {"inputlen": 3}, "random.inputlen: Extra inputs are not permitted"),
        ("random", {"input_len": 0}, "random.input_len: Input should be greater than or equal to 1"),
        ("random", {"range_ratio": 0.5, "input_cv": 1.0}, "give one or the other"),
        ("near-limit", {"context": 40}, "a context of 40 has no room for 16 output tokens and a slack of 32"),
        ("rag", {"documents": 2}, "4 documents cannot be retrieved from 2"),
        ("trace", {}, "the workload 'trace' reads a file: name it with --dataset-path"),
        ("trace", {"path": "nowhere"}, "the trace nowhere cannot be read: No such file"),
        ("sharegpt", {"path": "nowhere"}, "nowhere cannot be read: No such file"),
    ],
)
def test_what_cannot_be_made(name: str, options: dict[str, Any], message: str) -> None:
    """The option is named."""
    with pytest.raises(RequestError, match=message):
        make_work(name, count=1, vocab_size=1000, options=options, encode=encode)


def test_none_is_a_mistake() -> None:
    """A run of nothing has no metrics."""
    with pytest.raises(RequestError, match="at least one request, not 0"):
        make_work("random", count=0, vocab_size=1000)
