"""A work made to fit the context, and what was cut is said."""

from __future__ import annotations

from hypothesis import given, strategies as st

from octavo.bench.clipping import clip
from octavo.bench.work import Item, Work


def work(*items: Item) -> Work:
    return Work(name="test", items=items)


def item(prompt: int, output: int, after: int | None = None) -> Item:
    return Item(prompt=tuple(range(prompt)), output_len=output, after=after)


def test_what_fits_is_left_alone() -> None:
    """The same work, and nothing to say."""
    fits = work(item(90, 10))
    assert clip(fits, 100) == (fits, "")


def test_long_ones_are_cut() -> None:
    """The prompt from its end, down to half of the context, then the output; the hash is another one and the work says why."""
    clipped, said = clip(work(item(95, 10), item(200, 80), item(10, 500), item(5, 5)), 100)
    assert [(len(one.prompt), one.output_len) for one in clipped.items] == [(90, 10), (50, 50), (10, 90), (5, 5)]
    assert clipped.items[0].prompt == tuple(range(90))
    assert said == "max_model_len is 100: 3 of 4 requests are cut to fit" == clipped.made_from["clipped"]


def test_turns_that_do_not_fit_are_left_out() -> None:
    """With those after them; other conversations keep their order."""
    clipped, said = clip(work(item(40, 20), item(10, 10), item(30, 20, after=0), item(5, 5, after=1), item(1, 1, after=2)), 100)
    assert [(len(one.prompt), one.after) for one in clipped.items] == [(40, None), (10, None), (5, 1)]
    assert said == "max_model_len is 100: 2 turns of conversations do not fit and are left out"


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(2, 80),
)
def test_everything_fits_afterwards(drawn: list[tuple[int, int, int]], limit: int) -> None:
    """Whole conversations too."""
    items = [item(size, output, index - back if 0 < back <= index else None) for index, (size, output, back) in enumerate(drawn)]
    clipped, _ = clip(work(*items), limit)
    assert all(clipped.prompt_len(index) + one.output_len <= limit for index, one in enumerate(clipped.items))
    assert sum(one.after is None for one in clipped.items) == sum(one.after is None for one in items)
