"""When requests arrive: the rate and the burstiness asked for, the same for the same seed."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, strategies as st

from octavo.bench.arrivals import Arrivals, in_order, spread
from octavo.bench.work import Item

MANY = 4000


@given(st.floats(0.1, 1000), st.sampled_from([0.1, 0.5, 1.0, 4.0, 25.0]), st.integers(0, 1000))
def test_mean_and_variation_of_the_gaps(rate: float, burstiness: float, seed: int) -> None:
    """The mean gap is 1 / rate and its coefficient of variation 1 / sqrt(burstiness), within six standard errors."""
    gaps = Arrivals(rate=rate, burstiness=burstiness).gaps(MANY, seed=seed)
    cv = 1 / math.sqrt(burstiness)
    mean = statistics.fmean(gaps)
    assert abs(mean * rate - 1) < 6 * cv / math.sqrt(MANY)
    kurtosis = 6 / burstiness  # of a gamma distribution, in excess of a normal one's
    error = math.sqrt((kurtosis + 2) / MANY + 4 / (burstiness * MANY)) / 2 + cv / math.sqrt(MANY)
    assert abs(statistics.pstdev(gaps) / mean / cv - 1) < 6 * error
    assert min(gaps) >= 0


def test_a_poisson_process_has_exponential_gaps() -> None:
    """The share of gaps longer than t is exp(-rate t)."""
    gaps = Arrivals(rate=2.0).gaps(20_000, seed=1)
    for t in (0.1, 0.5, 1.0, 2.0):
        assert sum(gap > t for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2 * t), abs=0.015)


def test_even_at_once_and_repeatable() -> None:
    """Infinite burstiness is even, an infinite rate is all at once; a seed repeats itself and no other."""
    assert Arrivals(rate=4.0, burstiness=math.inf).times(4, seed=0) == [0.0, 0.25, 0.5, 0.75]
    assert Arrivals().times(3, seed=0) == [0.0, 0.0, 0.0]
    one, same, other = (Arrivals(rate=3.0).times(50, seed=seed) for seed in (1, 1, 2))
    assert one == same != other and one[0] == 0.0 and one == sorted(one)
    assert Arrivals(rate=1.0).times(0, seed=0) == []
    offered = Arrivals(rate=20.0).times(2000, seed=0)[-1]
    assert offered == pytest.approx(100, rel=0.1)  # B1: 2,000 prompts at 20 a second offer load for 100 s


@pytest.mark.parametrize(
    ("arrivals", "words"),
    [
        (Arrivals(), "all at once"),
        (Arrivals(rate=2.5), "2.5 a second, Poisson"),
        (Arrivals(rate=2.0, burstiness=0.5), "2 a second, gamma with burstiness 0.5"),
        (Arrivals(rate=2.0, burstiness=math.inf), "2 a second, evenly"),
    ],
)
def test_in_words(arrivals: Arrivals, words: str) -> None:
    """As they are printed."""
    assert str(arrivals) == words


@pytest.mark.parametrize("values", [{"rate": 0.0}, {"rate": -1.0}, {"rate": math.nan}, {"burstiness": 0.0}, {"burstiness": math.nan}])
def test_impossible_ones_are_refused(values: dict[str, float]) -> None:
    """With what to do instead."""
    with pytest.raises(ValueError, match="must be above 0, not"):
        Arrivals(**values)


def item(at: float, after: int | None = None) -> Item:
    return Item(prompt=(1,), output_len=1, at=at, after=after)


def test_items_of_one_number_arrive_together() -> None:
    """Later turns have no arrival of their own."""
    items = spread([item(0.0), item(0.0), item(0.0, after=0), item(1.0), item(7.0)], Arrivals(rate=2.0, burstiness=math.inf), seed=0)
    assert [(one.at, one.after) for one in items] == [(0.0, None), (0.0, None), (0.0, 0), (0.5, None), (1.0, None)]


@given(st.lists(st.tuples(st.floats(0, 9), st.integers(0, 5)), min_size=1, max_size=12))
def test_sorting_keeps_conversations(drawn: list[tuple[float, int]]) -> None:
    """In the order of their times, and each turn still behind the one that it goes on from."""
    items = [
        Item(prompt=(index + 1,), output_len=1, at=at, after=index - back if 0 < back <= index else None)
        for index, (at, back) in enumerate(drawn)
    ]
    before = {one.prompt: None if one.after is None else items[one.after].prompt for one in items}
    ordered = in_order(items)
    assert {one.prompt: None if one.after is None else ordered[one.after].prompt for one in ordered} == before
    assert all(one.after is None or one.after < place for place, one in enumerate(ordered))
    roots = [one.at for one in ordered if one.after is None]
    assert roots == sorted(roots)
