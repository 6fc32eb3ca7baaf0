"""The profile's parts are a step's, its bounds the roofline's, and the page says which part is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.bench import profile as module, roofline
from octavo.bench.drive import drive
from octavo.bench.profile import PARTS, Profile, decoding, main, output_len, page, plot, profile, prompt
from octavo.bench.roofline import Limits, cost_model
from octavo.bench.step_log import StepLog
from octavo.llm import LLM
from tests.models import tiny

LIMITS = Limits(bandwidth=1e9, flops=1e10, dtype="float32")


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A tiny one, for short cases."""
    monkeypatch.setattr(module, "CONTEXT", 12)
    monkeypatch.setattr(module, "STEPS", 4)
    return LLM(tiny("llama_gqa"), device="cpu", dtype="float32", max_model_len=128, num_kv_slots=512, max_num_seqs=4)


def test_parts_of_a_step_and_of_a_prompt(llm: LLM) -> None:
    """All parts, of the whole; bounds by hand for the weights that a step of three rows reads; attention's grow with the context."""
    costs = cost_model(llm.built.loaded)
    with llm:
        found = profile(llm.engine, decoding(3, 384, budget=2048), costs=costs, limits=LIMITS, repeats=2)
        whole = profile(llm.engine, prompt(100, 384), costs=costs, limits=LIMITS, repeats=1)
    for one in (found, whole):
        assert set(one.seconds) == set(PARTS) and min(one.seconds[name] for name in ("attention", "linears", "head", "rest")) > 0
        assert one.without > 0 and one.total > sum(one.seconds[name] for name in ("attention", "linears"))
    assert found.bounds["linears"] == pytest.approx(costs.block_weights * costs.weight_bytes / 1e9)
    assert found.bounds["head"] == pytest.approx(costs.head_weights * costs.weight_bytes / 1e9) and found.memory_bound["head"]
    assert whole.bounds["linears"] == pytest.approx(2 * costs.block_weights * 100 / 1e10) and not whole.memory_bound["linears"]
    assert whole.bounds["attention"] > found.bounds["attention"]


@pytest.mark.parametrize("budget", [5, 8, 13, 48, 2048])
def test_all_rows_decode_at_once(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many steps as are looked at, however long the last prompt waits while the first rows decode. Fewer are an error."""
    monkeypatch.setattr(module, "CONTEXT", 12)
    monkeypatch.setattr(module, "STEPS", 4)
    options = {"max_model_len": 128, "num_kv_slots": 1024, "max_num_seqs": 4, "max_num_batched_tokens": budget}
    with LLM(tiny("llama_gqa"), device="cpu", dtype="float32", **options) as llm:
        case, log = decoding(4, 384, budget=budget), StepLog(llm.engine.clock.now())
        with log.watching(llm.engine):
            drive(llm.engine, case.work)
    found = case.steps(log.lines)
    assert [(line.num_rows, line.num_tokens) for line in found] == [(4, 4)] * 4
    assert found[-1].step == [line.step for line in log.lines if line.num_rows == 4][-1]
    monkeypatch.setattr(module, "STEPS", len(log.lines))
    with pytest.raises(RuntimeError, match="too few; is the KV pool large enough"):
        case.steps(log.lines)


def test_many_rows_get_long_answers() -> None:
    """256 prompts of 256 tokens fill 36 steps of 2048 beside rows that decode."""
    assert [output_len(rows, 2048) for rows in (1, 64, 256)] == [35, 43, 71]


def test_a_prompt_in_chunks_is_added_up() -> None:
    """Its bound reads the weights once a step."""
    llm = LLM(
        tiny("llama_gqa"), device="cpu", dtype="float32", max_model_len=128, num_kv_slots=512, max_num_seqs=4, max_num_batched_tokens=25
    )
    costs = cost_model(llm.built.loaded)
    fast = Limits(bandwidth=1e9, flops=1e15, dtype="float32")
    with llm:
        found = profile(llm.engine, prompt(100, 384), costs=costs, limits=fast, repeats=1)
    assert found.bounds["linears"] == pytest.approx(4 * costs.block_weights * costs.weight_bytes / 1e9)


def of(name: str, **seconds: float) -> Profile:
    bounds = {"attention": 0.001, "linears": 0.004, "head": 0.001}
    memory = {"attention": True, "linears": True, "head": False}
    case = decoding(1, 384, budget=2048)
    return Profile(case=case, seconds=dict.fromkeys(PARTS, 0.0) | seconds, without=0.0099, bounds=bounds, memory_bound=memory)


def test_the_page_says_what_is_left() -> None:
    """From the largest, above the bounds; shares of bounds; what has none has none."""
    found = of("1 row", attention=0.004, linears=0.005, head=0.001, rest=0.0005)
    text = page([found], LIMITS, about="About.", figure="f.svg")
    assert (
        "9.90 ms, with timers 10.50 ms. Left above the bounds, from the largest: attention 3.00 ms, linears 1.00 ms, rest 0.50 ms." in text
    )
    assert "| linears | 5.00 | 47.6% | 4.00 | 80% | memory |" in text and "| head | 1.00 | 9.5% | 1.00 | 100% | arithmetic |" in text
    assert "| rest | 0.50 | 4.8% |  |  |  |" in text and "| all | 10.50 | 100.0% | 6.00 | 57% | |" in text
    assert "| all, untimed | 9.90 | | 6.00 | 61% | |" in text and "the timers, and Python's way through the layers" in text
    assert text.startswith("# ") and "## 1 row" in text and "(f.svg)" in text and "1.0 GB/s" in text


def test_the_plot_has_a_bar_of_bounds_beneath_each() -> None:
    """As an SVG document."""
    pytest.importorskip("matplotlib")
    svg = plot([of("1 row", linears=0.005), of("1 row", linears=0.006)])
    assert svg.startswith("<?xml") and "</svg>" in svg


def unable(*_: object, **__: object) -> Profile:
    """In the place of `profile`."""
    raise RuntimeError("1 row: too few")


def test_the_command_writes_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The page and its figure beside it; what is wrong is said."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(module, "CONTEXT", 12)
    monkeypatch.setattr(module, "STEPS", 4)
    monkeypatch.setattr(roofline, "MEASURE_S", 0.02)
    roofline._measured.cache_clear()
    out = tmp_path / "p" / "page.md"
    words = ["--model", str(tiny("llama_gqa")), "--dtype", "float32", "--repeats", "1", "--threads", "1"]
    assert main([*words, "--rows", "1", "2", "--prompts", "40", "--out", str(out)]) == 0
    roofline._measured.cache_clear()
    text = out.read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## 1 row", "## 2 rows", "## Prompt of 40"]
    assert out.with_suffix(".svg").read_text().startswith("<?xml") and "1 threads" in text
    monkeypatch.setattr(module, "profile", unable)
    assert main([*words, "--rows", "1", "--prompts", "40", "--out", str(out)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: 1 row: too few"
    assert main(["--model", str(tmp_path / "nowhere")]) == 2 and "there is no file or folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--repeats", "0"])
