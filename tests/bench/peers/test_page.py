"""The page says what was measured and judges it by the figures; what is missing has its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.intervals import Interval
from octavo.bench.peers.claims import MEMORY, ROWS, START, engines_of, judge, judge_limit
from octavo.bench.peers.outcome import Outcome
from octavo.bench.peers.page import page

FIVE = [1.0, 1.01, 0.99, 1.0, 1.0]


def outcome(**more: Any) -> Outcome:
    base: dict[str, Any] = {
        "settings": {"rows": list(ROWS), "rounds": 5, "threads": 2, "seed": 0, "scale": 1.0},
        "identity": {"cpu": "a processor", "cores": 2, "memory": 1 << 34, "date": "today", "model": "m", "weight_bytes": 100_000_000},
        "tokens": {"mixed": 1000, "one": 128},
        "seconds": {
            "mixed": {"Octavo": FIVE, "vLLM": [1.5 * s for s in FIVE], "Hugging Face": [2 * s for s in FIVE]},
            "one": {"Octavo": FIVE, "vLLM": [1.6 * s for s in FIVE], "Octavo int8": FIVE},
        },
        "problems": {"llama.cpp": "no environment was given: --llama-cpp PATH", "Octavo int4": "ConfigError: a | b\nc"},
        "facts": {"Octavo": {"versions": {"octavo": "0.1"}, "threads": 2, "stack": {"k": "paged", "o": "cpu"}, "native level": "avx2"}},
        "starts": {"Octavo": [1.6, 1.7, 1.5], "vLLM": [70.0]},
        "memory": {"Octavo": {"resident": 1, "peak": 900_000_000, "start_peak": 950_000_000, "kv": 150_000_000}},
        "alike": {"mixed": {"vLLM": (0.97, 0.5)}},
        "idle": {"vLLM": 0.004},
        "others": [0.01, 0.02],
        "finished": True,
    }
    return Outcome(**(base | more))


def row(text: str, beginning: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {beginning}"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_ratios_with_intervals_and_targets() -> None:
    """Times as fast, par, aim and what came of them."""
    text = page(outcome())
    assert row(text, "64 at once, 16-256 in") == [
        "64 at once, 16-256 in, 16-256 out", "1000 tok/s", "vLLM 667 tok/s", "1.50x [1.50, 1.50]", "1.2x", "1.4x", "aim met",
    ]  # fmt: skip
    assert row(text, "one request")[3:] == ["1.60x [1.60, 1.60]", "1.5x", "2.2x", "par met, aim missed by 0.60x"]
    assert row(text, "64 at once, against static")[3:] == ["2.00x [2.00, 2.00]", "3x", "4.5x", "par missed by 1.00x"]
    assert "a processor, 2 cores, 16 GiB, 2 threads" in text and "octavo 0.1, threads 2, stack paged/cpu, native level avx2" in text
    assert ">" not in text.replace("->", "")


def test_what_is_missing_says_why() -> None:
    """A peer that was not given, an option that there is not, a row that was not run."""
    text = page(outcome())
    assert row(text, "the same, against the Q4_1")[-1] == "not available: no environment was given: --llama-cpp PATH"
    assert row(text, "the same, weights in int4")[-1].startswith("not available: ConfigError: a / b c; no environment")
    assert row(text, "8 at once")[1:4] == ["-", "vLLM -", ""] and row(text, "8 at once")[-1] == "not available: it was not run"


def test_limits() -> None:
    """Seconds of start and MB beyond weights and pool, beside the peer's."""
    text = page(outcome())
    assert row(text, "process start")[1:] == ["1.60 s (1.50 to 1.70)", "vLLM 70.00 s", "43.8x less", "4 s", "1.7 s", "aim met"]
    assert row(text, "resident memory")[1:] == ["650 MB", "vLLM -", "", "", "600 MB", "aim missed by 50 MB"]
    assert row(text, "Octavo |") == ["Octavo", "900", "100", "150", "650", "950"]
    assert "vLLM is started twice, and the second time counts" in text


def test_a_pool_that_nobody_knows() -> None:
    """Has no figure of what is beyond it."""
    known = outcome().memory
    memory = known | {"vLLM": {"resident": 1, "peak": 3_000_000_000, "start_peak": 4_000_000_000, "kv": None}}
    text = page(outcome(memory=memory))
    assert row(text, "resident memory")[1:4] == ["650 MB", "vLLM -", ""]
    assert row(text, "vLLM |") == ["vLLM", "3000", "100", "-", "-", "4000"]


@pytest.mark.parametrize(
    ("alike", "answers", "differs"),
    [
        ({"mixed": {"vLLM": (0.4, 0.1)}}, {"mixed": 64}, ["40% in mixed"]),
        ({"mixed": {"vLLM": (0.5, 0.1)}}, {"mixed": 64}, []),
        ({"mixed": {"vLLM": (0.0, 0.0)}}, {"mixed": 7}, []),
        ({"one": {"vLLM": (0.0, 0.0)}}, {"one": 1}, ["0% in one"]),
        ({"prompt": {"vLLM": (0.0, 0.0)}}, {"prompt": 1}, []),
        ({"mixed": {"vLLM": (0.1, 0.0)}, "one": {"vLLM": (0.0, 0.0)}}, {"mixed": 64, "one": 1}, ["10% in mixed, 0% in one"]),
        ({"one": {"Octavo int8": (0.0, 0.0)}}, {"one": 1}, []),
    ],
)
def test_another_model_is_no_comparison(alike: Any, answers: dict[str, int], differs: list[str]) -> None:
    """Where answers have little in common, it is said before any figure, and no row calls a target met by it."""
    text = page(outcome(alike=alike, answers=answers))
    said = [line for line in text.partition("| work |")[0].splitlines() if "answers differently" in line]
    assert len(said) == len(differs)
    for line, shares in zip(said, differs, strict=True):
        assert line.startswith("> **vLLM answers differently") and shares in line
    for beginning in ("64 at once, 16-256 in", "one request"):
        assert (row(text, beginning)[-1] == "answers differ") is bool(differs)
    assert row(text, "64 at once, against static")[-1] == "par missed by 1.00x"


def test_rows_that_were_not_asked_for_are_not_there() -> None:
    """Only those that were chosen."""
    settings = outcome().settings | {"rows": ["one"]}
    table = page(outcome(settings=settings)).partition("## ")[0]
    assert "one request" in table and "process start" not in table and "static" not in table


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"finished": False}, "**Not finished**"),
        ({"others": [0.0, 0.5]}, "up to 0.50 cores in a turn"),
        ({"settings": outcome().settings | {"scale": 0.1}}, "Tried out at scale 0.1"),
    ],
)
def test_doubts_come_first(more: dict[str, Any], said: str) -> None:
    """Before any figure."""
    assert said in page(outcome(**more)).partition("| work |")[0]


def test_a_single_round_has_no_interval() -> None:
    """And is no proof."""
    seconds = {"mixed": {"Octavo": [1.0], "vLLM": [1.5]}}
    assert row(page(outcome(seconds=seconds)), "64 at once, 16-256 in")[3] == "1.50x (one round)"


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (Interval(1.5, 1.45, 1.55), "aim met"),
        (Interval(1.41, 1.38, 1.44), "aim met (the interval holds it)"),
        (Interval(1.3, 1.25, 1.35), "par met, aim missed by 0.10x"),
        (Interval(1.3, 1.2, 1.41), "par met, aim missed by 0.10x (the interval holds it)"),
        (Interval(1.1, 1.0, 1.15), "par missed by 0.10x"),
    ],
)
def test_verdicts(ratio: Interval, said: str) -> None:
    """By the ratio; the interval says whether the rounds decide it."""
    assert judge(ratio, par=1.2, aim=1.4) == said
    assert judge(Interval(0.9, 0.8, 0.95), par=None, aim=1.0) == "aim missed by 0.10x"


def test_verdicts_of_limits() -> None:
    """Lower is better."""
    assert [judge_limit(value, START) for value in (1.7, 2.0, 5.0)] == ["aim met", "par met, aim missed by 0.3 s", "par missed by 1 s"]
    assert [judge_limit(value, MEMORY) for value in (599.0, 700.0)] == ["aim met", "aim missed by 100 MB"]


def test_who_has_to_work() -> None:
    """Engines of the rows that were chosen, once each."""
    assert engines_of(["one"]) == {"one": ["Octavo", "vLLM", "llama.cpp", "Octavo int8", "Octavo int4"]}
    assert engines_of(["static", "mixed", "memory"]) == {"mixed": ["Octavo", "vLLM", "Hugging Face"]}
    assert engines_of(["start"]) == {} and set(engines_of(ROWS)) == {"mixed", "eight", "one", "prompt", "prefix"}


def test_the_figures_are_kept(tmp_path: Path) -> None:
    """All seconds, as JSON."""
    outcome().save(tmp_path / "o.json")
    kept = json.loads((tmp_path / "o.json").read_text())
    assert kept["schema"] == 1 and kept["seconds"]["mixed"]["Octavo"] == FIVE
