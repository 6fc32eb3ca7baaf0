"""What is made of a result: ratios with verdicts, claims, summaries, and the table."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.ablation.agreement import Lossy, Outputs, Rounding
from octavo.bench.ablation.breakdown import Breakdown
from octavo.bench.ablation.claims import check_claims, judge, prefill_prices, prefix_bound
from octavo.bench.ablation.measures import MEASURES, find_measure
from octavo.bench.ablation.result import AblationResult
from octavo.bench.ablation.summary import gaps_with_prefill, summarise
from octavo.bench.ablation.table import markdown
from octavo.bench.markdown import table
from octavo.bench.roofline import CostModel, Limits, RooflineShare, roofline
from octavo.bench.self_checks import TWICE
from octavo.bench.step_parts import ForwardParts
from octavo.core.errors import InvalidOptionsError, ResultError
from octavo.core.kv import KVStats
from tests.bench.ablation.made import AGAIN_TOO, BASE, FAST, OTHER, PARENTS, made, made_run, record, step, twice_as_fast
from tests.bench.test_compare import IDENTITY

AGAIN = "base (again)"


def test_ratios_are_to_the_parent() -> None:
    """Throughput twice as high is faster, and so is half the latency; the floor is the baseline against itself."""
    result = twice_as_fast(compared=["output tok/s", "TTFT p50"])
    rate, wait, floor, _ = result.comparisons("s")
    assert (rate.cell, rate.parent, rate.measure, rate.verdict) == ("fast", "base", "output tok/s", "faster")
    assert rate.interval is not None and rate.interval.ratio == pytest.approx(2.0, rel=0.01) and rate.interval.excludes_one
    assert wait.interval is not None and wait.interval.ratio == pytest.approx(0.5, rel=0.01) and wait.verdict == "faster"
    assert floor.cell == AGAIN and floor.interval == rate.floor and floor.verdict == "no difference beyond the noise"


def test_slower_and_nothing() -> None:
    """The same figures the other way round, and a cell that does nothing."""
    slow = made({"base": FAST, "fast": BASE, AGAIN: FAST}, parents=PARENTS)
    assert slow.comparisons("s")[0].verdict == "slower"
    idle = made({"base": BASE, "fast": AGAIN_TOO, AGAIN: BASE}, parents=PARENTS)
    assert idle.comparisons("s")[0].verdict == "no difference beyond the noise"


def test_failures_give_no_ratio() -> None:
    """A percentile that some requests never reached is no number (fault 47)."""
    result = twice_as_fast(compared=["TTFT p99"])
    for name in ("base", "fast"):
        result.runs["s", name, 1] = made_run(2.0, records=[record(0, 1.0, 2.0, 2.0), record(1)])
    first = result.comparisons("s")[0]
    assert first.interval is None and first.problem.startswith("TTFT p99 is not a number above 0 in every repeat")


@pytest.mark.parametrize("measure", ["output tok/s", "ITL p50", "ITL mean"])
def test_nobody_is_faster_for_having_failed(measure: str) -> None:
    """A cell that fails more requests than its parent in the repeats that both have has no ratio."""
    result = twice_as_fast(compared=[measure])
    result.runs["s", "fast", 1] = made_run(2.0, records=[record(0, 0.1, 0.2, 0.3), record(1)])
    first = result.comparisons("s")[0]
    assert (first.interval, first.verdict, first.problem) == (None, "too noisy to say", "1 requests failed, 0 of the parent's did")
    del result.runs["s", "base", 1], result.runs["s", AGAIN, 1]  # the repeat in which it failed has no pair
    assert result.comparisons("s")[0].interval is not None


def broken(**repeats: list[int]) -> AblationResult:
    """`twice_as_fast` where these repeats of these cells ended with an error."""
    result = twice_as_fast(repeats=3, compared=["output tok/s", "TTFT p50"], claims=[claim(at_least=1.5)])
    for cell, numbers in repeats.items():
        for repeat in numbers:
            del result.runs["s", cell, repeat]
            result.broken[f"s/{cell}/{repeat}"] = "RuntimeError: no memory"
    return result


@pytest.mark.parametrize(
    ("repeats", "problem"),
    [
        ({"fast": [1]}, "1 repeat of fast broke"),
        ({"fast": [0, 2]}, "2 repeats of fast broke"),
        ({"base": [1, 2]}, "2 repeats of base broke"),
        ({"fast": [0], "base": [1]}, "1 repeat of fast broke, 1 repeat of base broke"),
        ({"fast": [0, 1, 2]}, "3 repeats of fast broke"),
    ],
)
def test_nobody_is_faster_for_having_broken(repeats: dict[str, list[int]], problem: str) -> None:
    """A cell has neither ratio nor verdict nor claim from the repeats that survived, nor has one whose parent broke."""
    result = broken(**repeats)
    found = [one for one in result.comparisons("s") if one.cell == "fast"]
    assert [(one.interval, one.verdict, one.problem) for one in found] == [(None, "too noisy to say", problem)] * 2
    (judged,) = judge(result)
    assert (judged.outcome, judged.found) == ("undecided", problem)


def test_a_floor_that_broke_is_none() -> None:
    """Ratios stay, without a verdict."""
    first = broken(**{AGAIN: [1]}).comparisons("s")[0]
    assert first.interval is not None and (first.floor, first.verdict) == (None, "too noisy to say")
    assert first.problem == f"there is no noise floor: 1 repeat of {AGAIN} broke"


def test_requests_of_runs_that_broke_count_as_failed() -> None:
    """In the cell's row, its classes, its stability and the list of what requests said; of a cell that never ran to its end, too."""
    result = broken(fast=[0, 2])
    lost = result.lost("s", "fast")
    assert [run.work for run in lost] == [result.runs["s", "base", 0].work] * 2 and not any(run.complete for run in lost)
    found = summarise(result.of("s", "fast"), lost=lost)
    assert (found.repeats, found.speed.requests, found.speed.failed, found.failures) == (1, 6, 4, {"run broke": 4})
    assert (found.by_class["default"].requests, found.by_class["default"].failed) == (6, 4)
    assert (found.stability.failed, found.stability.stable) == (4, 0)
    text = markdown(result)
    assert "4 of 6 (4 run broke)" in text
    assert "* fast: 4 x run broke: RuntimeError: no memory (the first: seed 0, request 0)" in text
    (row,) = [line for line in lines_of(markdown(broken(fast=[0, 1, 2])), "| fast") if "part: a -> b" in line]
    assert row.rstrip(" |").endswith("6 of 6 (6 run broke)")
    alone = broken(base=[1], fast=[1], **{AGAIN: [1]})  # nobody has that repeat's work: as many requests
    assert [len(run.records) for run in alone.lost("s", "fast")] == [2]


def test_no_floor_by_failures() -> None:
    """The baseline's second run that fails requests is no noise floor, and that is said."""
    result = twice_as_fast()
    result.runs["s", AGAIN, 0] = made_run(4.0, records=[record(0, 1.0, 2.0, 4.0), record(1)])
    first = result.comparisons("s")[0]
    assert (first.floor, first.verdict) == (None, "too noisy to say")
    assert first.problem == "there is no noise floor: 1 requests failed, 0 of the parent's did"


def test_measures() -> None:
    """By name and by class; another name is refused with the nearest."""
    records = [record(0, 1.0, 2.0, 4.0, class_name="chat"), record(1, 3.0, 4.0, 5.0, class_name="batch")]
    assert find_measure("TTFT p50 [chat]")(records) == 1.0 and find_measure("TTFT p50")(records) == 2.0
    assert find_measure("output tok/s")(records) == 6 / 5 and find_measure("output tok/s [chat]")(records) == 3 / 5
    assert find_measure("req/s")(records) == 2 / 5 and find_measure("total tok/s")(records) == 206 / 5
    assert math.isnan(find_measure("ITL p99 [other]")(records))
    assert {name for name, one in MEASURES.items() if one.higher_is_better} == {"output tok/s", "total tok/s", "req/s"}
    with pytest.raises(InvalidOptionsError, match=r"compared: 'TTFT p55' is no measure \(did you mean TTFT p95\?\)|did you mean TTFT p5"):
        find_measure("TTFT p55")


def claim(**fields: object) -> dict[str, object]:
    return {"scenario": "s", "cell": "fast", "measure": "output tok/s"} | fields


@pytest.mark.parametrize(
    ("given", "outcome", "found"),
    [
        (claim(at_least=1.8), "holds", "2.00x [1.9"),
        (claim(at_least=3.0), "fails", "2.00x"),
        (claim(at_least=2.0), "undecided", "2.00x"),
        (claim(at_most=0.6, measure="TTFT p50"), "holds", "0.50x"),
        (claim(at_least=0.9, at_most=1.1), "fails", "2.00x"),
        (claim(at_least=1.8, prefill_gaps_at_least=0.05), "undecided", "prompts run in 0.0 % of base's gaps, which is less than"),
    ],
)
def test_claims(given: dict[str, object], outcome: str, found: str) -> None:
    """They hold or fail where the whole interval says so."""
    (judged,) = judge(twice_as_fast(claims=[given]))
    assert judged.outcome == outcome and found in judged.found


def test_claims_without_a_ratio_are_undecided() -> None:
    """Since tokens differ, for example."""
    (judged,) = judge(twice_as_fast(claims=[claim(at_least=1.0)], outputs={"fast": OTHER}))
    assert (judged.outcome, judged.found) == ("undecided", "its tokens are not the parent's")


def test_what_hits_could_save() -> None:
    """Cold, 200 prompt tokens take 3 of 4 s. With half of them found, 1.5 s are left out at most: 4 / 2.5."""
    cold = made_run(4.0, steps=[step(0.0, 3.0, tokens=200), step(3.0, 4.0)])
    warm = made_run(2.5, records=[record(0, 1.0, 2.0, 2.5, num_cached_tokens=40), record(1, 1.0, 2.0, 2.5, num_cached_tokens=60)])
    assert prefix_bound(cold, warm) == pytest.approx(4 / 2.5)
    assert prefix_bound(cold, cold) == 1.0


def test_what_a_prefix_costs_is_priced_by_its_place() -> None:
    """Steps of other sizes and contexts give a price for each token and each pair: 10 ms and 0.1 ms here. Of three pieces of 100, the first
    saves 1 s of linears and 0.505 s of attention; at a token's mean price it would be 2.505 s."""
    shapes = [(100, 5_050), (100, 15_050), (100, 25_050)]
    cold = made_run(10.0, records=[record(0, 1.0, 2.0, 10.0)])
    cold.steps.clear()
    for tokens, pairs in shapes:
        seconds = {"forward": 0.01 * tokens + 0.0001 * pairs}
        cold.steps.append(replace(step(0.0, 1.0, tokens=tokens), seconds=seconds, num_pairs=pairs))
    assert prefill_prices(cold) == pytest.approx((0.01, 0.0001))
    warm = made_run(8.0, records=[record(0, 1.0, 2.0, 8.0, num_cached_tokens=100)])
    assert prefix_bound(cold, warm) == pytest.approx(10 / (10 - 1.505))
    del cold.steps[1:]  # one size: tokens alone
    assert prefill_prices(cold) == pytest.approx((0.01505, 0.0))
    cold.steps.clear()
    assert prefill_prices(cold) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("extra", "outcome", "found"),
    [
        ((0.02, 0.02, 0.03), "holds", "0.58 % ["),
        ((0.4, 0.4, 0.4), "fails", "10.00 % [10.00, 10.00] added outside of forward passes"),
        ((0.0, 0.2, 0.0), "undecided", "1.67 % [-"),
    ],
)
def test_a_loss(extra: tuple[float, ...], outcome: str, found: str) -> None:
    """What a cell adds around the same forward passes, as a share of the parent's run, however much longer or shorter these were."""
    result = twice_as_fast(claims=[claim(lost_at_most=0.01)])
    for repeat, (added, noise) in enumerate(zip(extra, (1.0, -0.5, 0.1), strict=True)):
        passes = [replace(step(0.0, 1.0), seconds={"forward": 3.5, "sample": 0.1})]
        others = [replace(step(0.0, 1.0), seconds={"forward": 3.5 + noise, "sample": 0.1})]
        result.runs["s", "base", repeat] = made_run(4.0, steps=passes)
        result.runs["s", "fast", repeat] = made_run(4.0 + noise + added, steps=others)
    (judged,) = judge(result)
    assert judged.outcome == outcome and found in judged.found
    result.runs["s", "fast", 0].steps.append(step(0.0, 1.0))
    (judged,) = judge(result)
    assert judged.outcome == "undecided" and "its steps were others than base's" in judged.found


@pytest.mark.parametrize(
    ("factor", "measure", "outcome"),
    [
        (1.02, "output tok/s", "fails"),
        (1.02, "E2E p50", "fails"),
        (1.005, "output tok/s", "holds"),
        (1.005, "E2E p50", "holds"),
        (0.5, "output tok/s", "holds"),
        (0.5, "E2E p50", "holds"),
    ],
)
def test_a_loss_within_forward_passes(factor: float, measure: str, outcome: str) -> None:
    """A part that adds nothing around them and makes them slower costs too, where the ratio of whole runs is sure of it."""
    result = twice_as_fast(claims=[claim(lost_at_most=0.01, measure=measure)])
    for repeat, seconds in enumerate(BASE):
        for name, slower in (("base", 1.0), ("fast", factor)):
            passes = [replace(step(0.0, 1.0), seconds={"forward": slower * seconds - 0.2, "sample": 0.1})]
            result.runs["s", name, repeat] = made_run(slower * seconds, steps=passes)
    (judged,) = judge(result)
    assert judged.outcome == outcome
    assert ("whole runs lose more than 1 %" in judged.found) == (outcome == "fails")


def test_a_loss_is_a_claim_of_its_own() -> None:
    """Beside a ratio's bounds it would be unclear what is claimed."""
    with pytest.raises(ValueError, match="lost_at_most is a claim of its own"):
        twice_as_fast(claims=[claim(lost_at_most=0.01, at_least=1.0)])


def test_a_share_of_the_bound() -> None:
    """Twice as fast where 2.5 times were possible is 0.8 of it."""
    result = twice_as_fast(claims=[claim(at_least=0.9, of_bound=True)])
    for repeat in range(3):
        cold, warm = result.runs["s", "base", repeat], result.runs["s", "fast", repeat]
        cold.steps[:] = [step(0.0, 0.6 * BASE[repeat], tokens=200), step(0.6 * BASE[repeat], BASE[repeat])]
        for one in warm.records:
            one.num_cached_tokens = 100
    (judged,) = judge(result)
    assert judged.outcome == "fails" and "2.00x" in judged.found and "of at most 2.50x: 0.80x" in judged.found


def test_bounds_are_of_pairs() -> None:
    """Of the same repeat, and each ratio is divided by its own bound: one that always reaches it has no spread."""
    result = twice_as_fast(claims=[claim(at_least=0.99, of_bound=True)])
    for repeat, (seconds, share) in enumerate(((4.0, 0.2), (8.0, 0.4), (2.0, 0.6))):
        prefill = share * seconds
        result.runs["s", "base", repeat] = made_run(seconds, steps=[step(0.0, prefill, tokens=200), step(prefill, seconds)])
        warm = result.runs["s", "fast", repeat] = made_run(seconds - prefill)
        for one in warm.records:
            one.num_cached_tokens = 100
    assert judge(result)[0].found.endswith("1.00x [1.00, 1.00]")
    del result.runs["s", "base", 0], result.runs["s", "fast", 2]  # one pair is left
    (judged,) = judge(result)
    assert judged.outcome == "undecided" and judged.found.endswith("of at most 1.67x: 1.00x")


def test_hits_that_are_priced_at_a_whole_run() -> None:
    """There is no bound then, and nothing is decided."""
    result = twice_as_fast(claims=[claim(at_least=0.9, of_bound=True)])
    for repeat in range(3):
        result.runs["s", "fast", repeat].records[0].num_cached_tokens = 100_000
    (judged,) = judge(result)
    assert judged.outcome == "undecided" and "priced at more than a whole run" in judged.found


def test_a_bound_is_of_throughput() -> None:
    """A share of a speed-up says nothing of a time."""
    check_claims(twice_as_fast(claims=[claim(at_least=0.9, of_bound=True)]).spec)
    with pytest.raises(InvalidOptionsError, match="'TTFT p50' is a time, of which less is better"):
        check_claims(twice_as_fast(claims=[claim(at_most=0.9, of_bound=True, measure="TTFT p50")]).spec)


def test_gaps_with_prompts() -> None:
    """Four gaps, two of which hold the end of a step that computed a prompt."""
    steps = [step(0.0, 1.0, tokens=9), step(1.0, 2.0), step(2.0, 3.0, tokens=9)]
    run = made_run(3.0, records=[record(0, 1.0, 2.0, 3.001), record(1, 1.0, 2.0, 3.001)], steps=steps)
    assert gaps_with_prefill([run]) == 0.5
    assert gaps_with_prefill([made_run(3.0, records=[record(0)])]) == 0.0


def test_a_summary() -> None:
    """Medians of the repeats, counts of all of them; failures stay."""
    runs = [made_run(seconds) for seconds in (4.0, 2.0, 5.0)]
    runs[1] = made_run(2.0, records=[record(0, 0.5, 1.0, 2.0, num_preemptions=2, class_name="chat"), record(1)])
    found = summarise(runs)
    assert (found.repeats, found.speed.requests, found.speed.failed, found.failures) == (3, 6, 1, {"error": 1})
    assert (found.preemptions, found.mean_batch, found.peak_running, found.steps) == (2, 2.0, 2, 3)
    assert found.speed.output_tok_per_s == pytest.approx(1.5) and found.speed.latencies["ttft"].p50 == pytest.approx(1.25)
    assert found.by_class["chat"].requests == 1 and found.by_class["default"].failed == 1
    assert found.kv_shares["free"] == pytest.approx(70) and sum(found.kv_shares.values()) == pytest.approx(100)
    assert found.step_shares["forward"] == pytest.approx(1.0) and set(found.by_prompt_length) == {"65-128"}
    assert (found.copies, found.evictions, found.recomputed, found.prefix_seconds) == (0, 0, 0, 0.0)
    with pytest.raises(ValueError, match="without a run"):
        summarise([])


def test_what_stands_beside_the_shares_of_the_pool() -> None:
    """Of three repeats: copies, evictions, tokens computed again, and the time that 40 tokens found would have taken at 100 a second."""
    result = twice_as_fast()
    stats = KVStats(queried_tokens=80, hit_tokens=40, evictions=3, copies=2)
    for repeat in range(3):
        steps = [step(0.0, 1.0, tokens=100, num_recomputed=4), step(1.0, 2.0, num_recomputed=1, stats=stats)]
        result.runs["s", "fast", repeat] = made_run(2.0, steps=steps)
    lines = markdown(result).splitlines()
    heads, *rows = [cells_of(line) for line in lines if "| token states" in line or line.rstrip(" |").endswith("| -")]
    found = {row[0]: dict(zip(heads, row, strict=True)) for row in rows if len(row) == len(heads)}
    beside = ("copies", "evictions", "recomputed", "prefix hits spare")
    assert [found["fast"][name] for name in beside] == ["6", "9", "15", "1.20 s"]
    assert [found["base"][name] for name in beside] == ["0", "0", "0", "0 ms"]


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_the_table() -> None:
    """Tokens stand before speeds; ratios with their intervals; claims at the end."""
    text = markdown(twice_as_fast(claims=[claim(at_least=1.5)], summary="why"))
    assert text.startswith("# Ablation: made\n\nwhy\n\n## s: 2 x random, input_len 100; 2 at once\n")
    assert text.index("fast against base: fp32: 2/2 the same") < text.index("| tok/s") < text.index("noise floor")
    assert "* base against the fp32 reference: fp32: 2/2 the same" in text
    (fast,) = [line for line in lines_of(text, "| fast") if "part: a -> b" in line]
    cells = [cell.strip() for cell in fast.strip("|").split("|")]
    assert cells[:10] == ["fast", "part: a -> b", "3.0", "1.00", "500 ms", "500 ms *", "750 ms", "750 ms", "1.00 s *", "2.00 s"]
    assert cells[10:] == ["2.0", "2", "0.0", "0 %", "0", "0"]
    assert any("2.00x [1.9" in line and line.rstrip(" |").endswith("faster") for line in lines_of(text, "| fast"))
    assert "| s: fast has at least 1.5x its parent's output tok/s | holds" in text
    tables = [part for part in map(str.strip, text.split("\n\n")) if part.startswith("|")]
    assert len(tables) == 7 and all(len({len(line) for line in part.splitlines()}) == 1 for part in tables)


def test_no_speed_where_tokens_differ() -> None:
    """The difference is shown, and of that cell no rate, no latency and no ratio."""
    text = markdown(twice_as_fast(outputs={"fast": OTHER}))
    assert "  DIFFERENT: seed 0, item 1, token 3: 6 instead of 5, logits 0.5 apart" in text
    (fast,) = [line for line in lines_of(text, "| fast") if "part: a -> b" in line]
    assert fast.count(" - ") == 8
    assert any("its tokens are not the parent's" in line for line in lines_of(text, "| fast"))
    assert not any("x [" in line for line in lines_of(text, "| fast"))


def test_failures_and_broken_runs_are_listed() -> None:
    """In the row, with their number and reason; runs that broke below."""
    result = twice_as_fast()
    result.runs["s", "fast", 0] = made_run(2.0, records=[record(0, 1.0, 1.5, 2.0), record(1)])
    del result.runs["s", "fast", 2]
    result.broken["s/fast/2"] = "RuntimeError: no"
    text = markdown(result)
    assert "3 of 6 (1 error, 2 run broke)" in text and "## Runs that broke\n\n* s/fast/2: RuntimeError: no\n" in text


def test_runs_that_contradict_themselves() -> None:
    """A pool that is not empty at the end, as in these made-up runs, is one matter; the clock is another."""
    result = twice_as_fast()
    structural, of_time = result.failed_checks(of_time=False), result.failed_checks(of_time=True)
    assert any("pool empty at the end" in problem for problem in structural["s/fast/0"])
    assert not any("pool" in problem for problems in of_time.values() for problem in problems)
    text = markdown(result)
    assert "## Self-checks\n\n* FAILED: s/base/0: pool empty at the end: " in text and "* FAILED: s/fast/0: pool empty at the end: " in text
    (passed,) = lines_of(text, "* passed: ")
    assert f"{TWICE}, " in passed and "shares sum to 100 (9 of 9)" in passed and "pool empty" not in passed and "Little" not in passed
    assert "* not applicable: Little's law (9 of 9): 2 requests were in the system, and of fewer than 8 a mean says little\n" in text
    assert result.unsteady("s") == []
    shaky = made({"base": BASE, AGAIN: FAST}, parents=PARENTS)
    (said,) = shaky.unsteady("s")
    assert said.startswith("the same stack measured twice differs by +100.0% in output tok/s")
    assert shaky.failed_checks(of_time=True)["s"] == [f"{TWICE}: {said}"] and "s" not in shaky.failed_checks(of_time=False)
    assert markdown(shaky).count(said) == 1


def test_a_baseline_is_compared_with_itself_in_every_measure() -> None:
    """Pair by pair, and not by the main measure alone."""
    result = twice_as_fast(compared=["output tok/s", "TTFT p50"])
    for repeat, seconds in enumerate(AGAIN_TOO):
        times = (seconds / 3, seconds / 2, seconds)
        result.runs["s", AGAIN, repeat] = made_run(seconds, records=[record(0, *times), record(1, *times)])
    (said,) = result.unsteady("s")
    assert said.startswith("the same stack measured twice differs by +33.3% in TTFT p50")
    paired = made({"base": [1.0, 4.0, 8.0], AGAIN: [2.0, 4.0, 8.0]}, parents=PARENTS)
    assert "-20.6% in output tok/s" in paired.unsteady("s")[0]  # whose medians are equal


def test_a_baseline_that_answers_nothing() -> None:
    """It is named, and the table is made all the same."""
    nothing = [record(0), record(1)]
    result = twice_as_fast()
    for repeat in range(3):
        for name in ("base", AGAIN):
            result.runs["s", name, repeat] = made_run(4.0, records=nothing)
    assert "has no output tok/s above 0 in every repeat" in result.unsteady("s")[0]
    assert "has no output tok/s above 0" in markdown(result)


def test_a_baseline_that_ran_once() -> None:
    """It is said that it was not compared with itself."""
    text = markdown(made({"base": BASE}, parents={}))
    assert f"* not applicable: {TWICE}: the baseline was not run twice\n" in text


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_latencies() -> None:
    """A line a cell and latency, with the number of values; a p99 of fewer than 100 values is marked, and of other tokens none is given."""
    result = twice_as_fast()
    times = [0.5 + 0.01 * step for step in range(120)]
    for repeat in range(3):
        result.runs["s", "fast", repeat] = made_run(2.0, records=[record(0, *times[: 110 + repeat]), record(1, 0.5)])
    text = markdown(result)
    rows = {tuple(cells[:2]): cells[2:] for cells in map(cells_of, lines_of(text, "| "))}
    assert rows["fast", "ITL"] == ["10 ms", "10 ms", "10 ms", "10 ms", "109 to 111"]
    assert rows["fast", "TTFT"] == ["500 ms", "500 ms", "500 ms", "500 ms *", "2"]
    assert rows["base", "E2E"] == ["4.00 s", "4.00 s", "4.00 s", "4.00 s *", "2"] and ("base", "queue") in rows and ("base", "TPOT") in rows
    assert "A p99 with a * is of fewer than 100 values" in text
    other = {tuple(cells_of(line)[:2]) for line in lines_of(markdown(twice_as_fast(outputs={"fast": OTHER})), "| ")}
    assert ("fast", "TTFT") not in other and ("base", "TTFT") in other


def test_what_failed_requests_said() -> None:
    """The first of each kind, three kinds of a cell."""
    result = twice_as_fast()
    kinds = ["full", "full", "late", "odd", "new"]
    result.runs["s", "base", 1] = made_run(4.0, records=[record(0, 1.0, 4.0), *(record(1 + n, error=said) for n, said in enumerate(kinds))])
    text = markdown(result)
    assert "Requests without a whole answer:\n\n* base: 2 x error: full (the first: seed 0, request 1)\n* base: 1 x error: late (" in text
    assert "* base: further kinds of failures: 1\n" in text and "error: new" not in text
    assert "without a whole answer" not in markdown(twice_as_fast())


def test_with_what_each_cell_was_measured() -> None:
    """Once what all share; in a line what a cell may differ in, with the work of each repeat; "-" where a repeat is missing."""
    result = twice_as_fast(repeats=3)
    for (_, cell, _), run in result.runs.items():
        changes: dict[str, Any] = {"config_hash": "b" * 64}
        if cell == "fast":
            changes = {"config_hash": "f" * 64, "dtype": "bfloat16", "threads": 1}
        run.identity = replace(IDENTITY, **changes)
    del result.runs["s", "fast", 1]
    text = markdown(result)
    said = text[text.index("## Measured with") :]
    assert said.count("EPYC, 2 cores") == said.count("octavo 0.1.0, torch 2.13.0") == said.count("| revision") == 1
    digest = result.runs["s", "base", 0].work.digest[:8]
    rows = [cells_of(line) for line in said.splitlines() if line.startswith("| s ")]
    assert rows[0] == ["s", "base", "chunked", "b" * 8, "float32", "2", f"{digest} {digest} {digest}"]
    assert rows[1] == ["s", "fast", "chunked", "f" * 8, "bfloat16, KV in float32", "1", f"{digest} - {digest}"]
    assert "## Measured with" not in markdown(twice_as_fast())


def test_how_good_tokens_are_stands_beside_how_fast_they_come() -> None:
    """Two columns, where some cell is lossy; none where all compute the same."""
    rounding = Rounding(tokens=1000, off=20, farthest=0.1)
    lossy = Lossy(rounding=rounding, naive=rounding, same_answers=1, answers=2, perplexity=3.25, parent_perplexity=3.5)
    text = markdown(twice_as_fast(outputs={"fast": Outputs(exact=None, lossy=lossy)}))
    heads, *rows = [cells_of(line) for line in text.splitlines() if "| change" in line or "part: a -> b" in line or "| baseline" in line]
    found = [dict(zip(heads, row, strict=True)) for row in rows]
    assert [(row["agreement"], row["perplexity (parent's)"]) for row in found] == [("-", "-"), ("98.00 %", "3.250 (3.500)")]
    assert heads.index("agreement") == heads.index("E2E p50") + 1
    assert "agreement" not in markdown(twice_as_fast())


def test_bytes_and_operations_against_the_device() -> None:
    """A step of 2 GB and 4 GFLOP in a tenth of a second, on a device of 40 GB/s and 100 GFLOP/s; and ms of each part of a step."""
    result = twice_as_fast()
    share = RooflineShare(steps=10, seconds=1.0, least=0.5, num_bytes=20e9, flops=40e9, memory_bound=9)
    limits = Limits(bandwidth=40e9, flops=100e9, dtype="float32")
    forward = ForwardParts(attention=1.0, linear=2.0, rest=1.0)
    result.breakdowns["s"] = {"fast": Breakdown(forward=forward, knows_linears=True, limits=limits, roofline={"decode": share})}
    text = markdown(result)
    assert "Measured on this device: 40.0 GB/s read, 100.0 GFLOP/s in float32; ridge batch 5 " in text
    (row,) = [cells_of(line) for line in lines_of(text, "| fast") if "| decode" in line]
    assert row[2:] == ["10", "100.00", "2.000", "20.0", "50 %", "4.000", "40.0", "40 %", "90 %", "50 %"]
    (row,) = [cells_of(line) for line in lines_of(text, "| fast") if " ms)" in line]
    step_ms = 1000 * sum(FAST) / 9  # nine steps, all of them forward passes
    assert row[2] == f"{step_ms:.2f}" and row[5] == f"100.0 % ({step_ms:.2f} ms)"
    assert row[8:11] == [f"{part:.1f} % ({part / 100 * step_ms:.2f} ms)" for part in (25, 50, 25)]


def test_guesses_are_no_prompt() -> None:
    """A step that checks what was guessed decodes, however many tokens it has: of it no gap is one of a prompt, and no bound is made."""
    guessed = step(2.0, 3.0, rows=2, tokens=8, num_drafted=6)
    assert not guessed.computes_prompt and step(0.0, 1.0, rows=2, tokens=8, num_drafted=5).computes_prompt
    run = made_run(4.0, steps=[step(0.0, 1.0, tokens=200), guessed, step(3.0, 4.0)])
    assert gaps_with_prefill([run]) == 0.0
    warm = made_run(3.5, records=[record(0, 1.0, 2.0, 3.5, num_cached_tokens=100), record(1, 1.0, 2.0, 3.5)])
    assert prefix_bound(run, warm) == pytest.approx(4 / 3.5)  # half of the prompts' tokens, of which 200 took one second
    costs = CostModel(block_weights=1, head_weights=1, weight_bytes=1, kv_bytes=1, flops_per_pair=1)
    found = roofline(run.steps, costs, Limits(bandwidth=1.0, flops=1.0, dtype="float32"))
    assert (found["prompts"].steps, found["decode"].steps) == (1, 2)


def test_an_unfinished_result_has_a_table() -> None:
    """Of what there is."""
    result = twice_as_fast()
    for key in [key for key in result.runs if key[1] != "base"]:
        del result.runs[key]
    result.outputs.clear()
    text = markdown(result)
    assert "* fast: not compared yet" in text and lines_of(text, "| base ")


def test_runs_whose_tokens_are_not_compared_are_in_no_ratio() -> None:
    """They are said to be not compared yet, not to differ."""
    result = twice_as_fast()
    result.compared["s"] = [0, 2]
    first = result.comparisons("s")[0]
    assert first.interval is not None and first.interval.ratio == pytest.approx((BASE[0] / FAST[0] * BASE[2] / FAST[2]) ** 0.5)
    result.compared.clear()
    assert {one.problem for one in result.comparisons("s")} == {"its tokens are not compared yet"}
    result.outputs.clear()
    assert {one.problem for one in result.comparisons("s")} == {"its tokens are not compared yet"}


def test_a_table_lines_up() -> None:
    """Also with a bar in a cell; without rows there is none."""
    assert table(["a", "b"], [["x|y", "1"]]) == ["| a    | b |", "|------|---|", "| x\\|y | 1 |"]
    assert table(["a"], []) == []


def test_folders_that_are_no_result(tmp_path: Path) -> None:
    """Missing, damaged, and of a later version."""
    with pytest.raises(ResultError, match=r"is no result of octavo ablate: ablation\.json cannot be read"):
        AblationResult.load(tmp_path)
    twice_as_fast().save(tmp_path)
    path = tmp_path / "ablation.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"schema_version": 3}))
    with pytest.raises(ResultError, match="has schema version 3, this Octavo reads up to 2: update Octavo"):
        AblationResult.load(tmp_path)
    for damaged in (written | {"spec": {}}, {"schema_version": 1}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(ResultError, match="is damaged"):
            AblationResult.load(tmp_path)
