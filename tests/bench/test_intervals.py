"""Intervals of ratios: they cover as often as they say, find what is there, and find nothing where nothing is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.bench.intervals import Interval, _student, mean_interval, ratio_interval, verdict

FLOOR = Interval(1.0, 0.99, 1.01)


def runs(rng: np.random.Generator, value: float, noise: float, count: int) -> list[float]:
    return (value * np.exp(rng.normal(0, noise, count))).tolist()


def test_the_quantile_is_students() -> None:
    """As in printed tables."""
    for freedom, expected in ((1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042)):
        assert _student(freedom, 0.95) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("count", "least"), [(2, 0.93), (3, 0.93), (4, 0.93), (5, 0.93), (8, 0.92), (20, 0.93)])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_coverage(count: int, least: float, ratio: float) -> None:
    """The interval holds the true ratio nearly as often as 95 times in 100, with drift that both sides of a pair share.

    With four repeats all lie on one side of the truth one time in eight, where no resampling can help.
    """
    rng, held, trials = np.random.default_rng(1), 0, 600
    for _ in range(trials):
        drift = np.exp(rng.normal(0, 0.3, count))
        baseline = (np.array(runs(rng, 100, 0.05, count)) * drift).tolist()
        candidate = (np.array(runs(rng, 100 * ratio, 0.05, count)) * drift).tolist()
        interval = ratio_interval(candidate, baseline, resamples=2000)
        held += interval.low <= ratio <= interval.high
    assert least <= held / trials <= 0.98


@pytest.mark.parametrize("count", [16, 20, 40])
def test_coverage_among_other_tenants(count: int) -> None:
    """One pair in five is off by a third: the interval still holds the truth, and is narrower than that of plain means."""
    rng, held, trials, width, plain = np.random.default_rng(3), 0, 300, 0.0, 0.0
    for _ in range(trials):
        logs = np.where(rng.random(count) < 0.2, rng.normal(0, 0.35, count), rng.normal(0, 0.08, count))
        interval = ratio_interval(np.exp(logs).tolist(), [1.0] * count, resamples=1000)
        held += interval.low <= 1 <= interval.high
        width += math.log(interval.high / interval.low)
        plain += 2 * _student(count - 1, 0.95) * float(logs.std(ddof=1)) / math.sqrt(count)
    assert 0.93 <= held / trials <= 0.99
    assert width < 0.95 * plain


def test_many_repeats_are_trimmed_and_few_are_not() -> None:
    """Of 20, four at each end don't count, however far off they are; of 15, all do."""
    wild = [1e-6, 0.1, 0.5, 0.9, *[2.0] * 12, 3.0, 10.0, 1e3, 1e9]
    assert ratio_interval(wild, [1.0] * 20).ratio == pytest.approx(2.0)
    assert ratio_interval([2.0] * 14 + [2.0**16], [1.0] * 15).ratio == pytest.approx(4.0)


def test_a_slowdown_of_ten_percent_is_found_and_nothing_is_not() -> None:
    """With noise of 1 % and five repeats: in 200 trials nearly all of the first, none of the second worth speaking of."""
    rng, found, invented = np.random.default_rng(2), 0, 0
    for _ in range(200):
        first, second = runs(rng, 100, 0.01, 5), runs(rng, 100, 0.01, 5)
        floor = ratio_interval(second, first, resamples=2000)
        slowed = ratio_interval(runs(rng, 90, 0.01, 5), first, resamples=2000)
        same = ratio_interval(runs(rng, 100, 0.01, 5), first, resamples=2000)
        found += verdict(slowed, floor, higher_is_better=True) == "slower"
        invented += verdict(same, floor, higher_is_better=True) in ("faster", "slower")
    assert found >= 195 and invented <= 4


def test_the_same_seed_gives_the_same_interval() -> None:
    """And swapping the sides gives the inverse."""
    one, other = [3.0, 3.3, 2.9, 3.1], [2.0, 2.1, 1.9, 2.2]
    assert ratio_interval(one, other, seed=5) == ratio_interval(one, other, seed=5)
    forth, back = ratio_interval(one, other), ratio_interval(other, one)
    assert forth.ratio == pytest.approx(1 / back.ratio)
    assert forth.low == pytest.approx(1 / back.high, rel=0.02) and forth.low < forth.ratio < forth.high


def test_one_repeat_has_no_interval() -> None:
    """Nothing is known of its noise, and nothing is said."""
    alone = ratio_interval([2.0], [1.0])
    assert (alone.ratio, alone.low, alone.high) == (2.0, 0.0, math.inf) and str(alone) == "2.00x"
    assert verdict(alone, FLOOR, higher_is_better=True) == "too noisy to say"
    assert verdict(Interval(2.0, 1.9, 2.1), alone, higher_is_better=True) == "too noisy to say"


@pytest.mark.parametrize(("candidate", "baseline"), [([1.0], []), ([], []), ([1.0, 2.0], [1.0]), ([0.0], [1.0]), ([1.0], [math.nan])])
def test_what_is_no_ratio(candidate: list[float], baseline: list[float]) -> None:
    """Refused, not computed."""
    with pytest.raises(ValueError, match=r"repeats must come in pairs|needs values above 0"):
        ratio_interval(candidate, baseline)


@pytest.mark.parametrize(
    ("interval", "floor", "higher", "expected"),
    [
        (Interval(1.2, 1.1, 1.3), FLOOR, True, "faster"),
        (Interval(1.2, 1.1, 1.3), FLOOR, False, "slower"),
        (Interval(0.8, 0.7, 0.9), FLOOR, True, "slower"),
        (Interval(0.8, 0.7, 0.9), FLOOR, False, "faster"),
        (Interval(1.02, 1.005, 1.03), FLOOR, True, "no difference beyond the noise"),  # leaves out 1, but not the floor
        (Interval(1.2, 1.1, 1.3), Interval(0.9, 0.85, 0.95), True, "too noisy to say"),  # the floor counts in both directions
        (Interval(1.2, 0.9, 1.6), FLOOR, True, "too noisy to say"),
        (Interval(1.0, 0.99, 1.01), Interval(1.0, 0.9, 1.1), True, "too noisy to say"),
    ],
)
def test_verdicts(interval: Interval, floor: Interval, higher: bool, expected: str) -> None:
    """Only what neither chance nor the floor explains is called a difference."""
    assert verdict(interval, floor, higher_is_better=higher) == expected


def test_a_mean_and_its_interval() -> None:
    """t of four degrees of freedom is 2.776: 1 to 5 give 3 +- 2.776 * 1.581 / sqrt(5). One value has no ends."""
    assert mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3.0, 1.0368, 4.9632), abs=1e-3)
    assert mean_interval([2.0]) == (2.0, -math.inf, math.inf)
