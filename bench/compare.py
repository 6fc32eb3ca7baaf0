"""An old result against a new one: ratios with intervals, and whether anything became slower.

Both must be of the same model revision, context, limits, load, device and work; else the difference is refused by name. An option that
only one version knows is a note. Repeats are paired by their work, but not by the time they ran at: what a day does to a machine is in
the ratio. So a difference counts only beyond a tolerance, and beyond what a baseline showed beside itself in either result.
Must not know: engines, how it is printed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.bench.ablation.measures import find_measure
from octavo.bench.ablation.spec import AGAIN
from octavo.bench.figures import CellFigures, Figures
from octavo.bench.intervals import Interval, ratio_interval
from octavo.core.errors import ResultError

TOLERANCE = 0.05
SAME = (
    "model_revision",
    "dtype",
    "kv_dtype",
    "max_model_len",
    "pool_slots",
    "stack",
    "device",
    "driver",
    "cpu",
    "cores",
    "threads",
)
"""Of an Identity: what both results must have in common."""
DECIDED = ("device", "dtype", "kv_dtype", "max_model_len", "num_kv_slots", "kv_cache_memory", "gpu_memory_utilization")
"""Of the engine's options: what SAME has as it came to be, however it was asked for."""

Found = Literal["slower", "faster", "not slower", "too noisy to say"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One measure of one cell, new / old."""

    cell: str
    measure: str
    interval: Interval | None  # None: there is no ratio, for the reason in `problem`
    noise: float  # the ratio, at least 1, up to which a difference says nothing
    found: Found
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of two results."""

    changes: list[Change]
    notes: list[str]  # what differs and is allowed to

    @property
    def regressed(self) -> bool:
        """Something became slower, or fails, or gives other tokens."""
        return any(one.found == "slower" for one in self.changes)

    @property
    def says_nothing(self) -> bool:
        """Of some cell, all that was measured is too noisy."""
        cells = {one.cell for one in self.changes}
        return not cells <= {one.cell for one in self.changes if one.found != "too noisy to say"}


def compare(old: Figures, new: Figures, *, tolerance: float = TOLERANCE) -> Comparison:
    """Every cell and measure of the old result in the new one. Raises ResultError that names what keeps them from being compared.

    Self-checks of time that failed (`Figures.doubts`) keep nothing from being compared: who asks says whether they matter.
    """
    _refuse_broken(old, new)
    cells = [name for name in old.cells if not name.endswith(AGAIN)]
    if not cells:
        raise ResultError("the old result has no cell that ran")
    if missing := [name for name in cells if name not in new.cells]:
        raise ResultError(f"the new result lacks {', '.join(missing)}; it has {', '.join(new.cells)}")
    differences = {name: _differences(old.cells[name], new.cells[name]) for name in cells}
    if any(differences.values()):
        name, found = next((name, found) for name, found in differences.items() if found)
        raise ResultError(f"results that cannot be compared: {name}: {'; '.join(found)}")
    changes = [
        _change(name, measure, old, new, tolerance)
        for name in cells
        for measure in old.cells[name].values
        if measure in new.cells[name].values
    ]
    told = [f"of the {name} result, {note}" for name, result in (("old", old), ("new", new)) for note in result.notes]
    return Comparison(changes=changes, notes=[*told, *_notes(old.cells[cells[0]], new.cells[cells[0]])])


def _refuse_broken(old: Figures, new: Figures) -> None:
    for name, figures in (("old", old), ("new", new)):
        if figures.problems:
            more = f", and {len(figures.problems) - 1} more" if len(figures.problems) > 1 else ""
            raise ResultError(f"the {name} result fails a self-check, so that it says nothing: {figures.problems[0]}{more}")


def _differences(old: CellFigures, new: CellFigures) -> list[str]:
    found = [
        f"{name} is {_said(getattr(new.identity, name))}, was {_said(getattr(old.identity, name))}"
        for name in SAME
        if getattr(old.identity, name) != getattr(new.identity, name)
    ]
    before, after = _flat(old), _flat(new)
    found += [f"option {name} is {after[name]!r}, was {before[name]!r}" for name in before if name in after and before[name] != after[name]]
    if old.load and new.load:  # figures of an earlier schema know none
        names = dict.fromkeys([*old.load, *new.load])
        found += [
            f"the load's {name} is {new.load.get(name)!r}, was {old.load.get(name)!r}"
            for name in names
            if old.load.get(name) != new.load.get(name)
        ]
    if not _pairs(old, new):
        found.append("no repeat has the same work (see workload, sizes and seed)")
    return found


def _flat(cell: CellFigures) -> dict[str, object]:
    """Options by "kind.name"."""
    return {
        f"{kind}.{name}": value
        for kind, options in cell.identity.options.items()
        for name, value in options.items()
        if not (kind == "engine" and name in DECIDED)
    }


def _pairs(old: CellFigures, new: CellFigures) -> list[tuple[int, int]]:
    """Positions of repeats (old, new) that had the same work; where several of one result had, the first goes with the first."""
    places: dict[str, list[int]] = {}
    for at, work in enumerate(new.workloads):
        places.setdefault(work, []).append(at)
    return [(at, places[work].pop(0)) for at, work in enumerate(old.workloads) if places.get(work)]


def _said(value: object) -> str:
    return " + ".join(value.values()) if isinstance(value, Mapping) else repr(value)


def _notes(old: CellFigures, new: CellFigures) -> list[str]:
    before, after = old.identity, new.identity
    notes = [
        f"{name} {after.versions.get(name)}, was {version}"
        for name, version in before.versions.items()
        if version != after.versions.get(name)
    ]
    known = _flat(old), _flat(new)
    notes += [f"option {name} is {value!r}, which the old result did not know" for name, value in known[1].items() if name not in known[0]]
    notes += [
        f"option {name} was {value!r}, which the new result does not know" for name, value in known[0].items() if name not in known[1]
    ]
    if bool(old.load) != bool(new.load):
        notes.append("one of the results does not say its load: whether it was the same is not known")
    return [*notes, f"measured {after.date}, was {before.date}"]


def _change(name: str, measure: str, old: Figures, new: Figures, tolerance: float) -> Change:
    before, after = old.cells[name], new.cells[name]
    pairs = _pairs(before, after)
    limit = math.log1p(tolerance)
    noise = max(limit, _noise(old, name, measure), _noise(new, name, measure))
    interval, found, problem = None, "too noisy to say", ""
    if not after.tokens_hold and before.tokens_hold:
        found, problem = "slower", "its tokens are no longer what they must be"
    elif (failed := sum(after.failed[i] for _, i in pairs)) > (did := sum(before.failed[i] for i, _ in pairs)):
        found, problem = "slower", f"{failed} requests failed, {did} did"
    else:
        interval, problem = _interval(before, after, measure)
    if interval is not None:
        found = _judge(interval, noise, limit, higher_is_better=find_measure(measure).higher_is_better)
    return Change(cell=name, measure=measure, interval=interval, noise=math.exp(noise), found=found, problem=problem)  # type: ignore[arg-type]


def _interval(old: CellFigures, new: CellFigures, measure: str) -> tuple[Interval | None, str]:
    """Over the repeats that had the same work."""
    pairs = [(new.values[measure][n], old.values[measure][o]) for o, n in _pairs(old, new)]
    if not pairs:
        return None, "no repeat has the same work"
    numbers = [(one, other) for one, other in pairs if one and other]
    if len(numbers) < len(pairs):
        return None, "there is no such number in every repeat"
    return ratio_interval([one for one, _ in numbers], [other for _, other in numbers]), "one repeat" if len(pairs) == 1 else ""


def _noise(figures: Figures, name: str, measure: str) -> float:
    """The largest difference, as a logarithm, that this cell's baseline shows beside itself; 0 where it was not run twice.

    Of an ablation, one cell of each scenario was.
    """
    scenario = name.rpartition("/")[0]
    noise = 0.0
    for again, cell in figures.cells.items():
        if again.endswith(AGAIN) and again.rpartition("/")[0] == scenario and measure in cell.values:
            floor, _ = _interval(figures.cells[again.removesuffix(AGAIN)], cell, measure)
            if floor is not None and floor.low > 0 and floor.high < math.inf:
                noise = max(noise, abs(math.log(floor.low)), abs(math.log(floor.high)))
    return noise


def _judge(interval: Interval, noise: float, limit: float, *, higher_is_better: bool) -> Found:
    """Slower or faster only where the whole interval is beyond the noise; not slower where it leaves out a loss above the tolerance."""
    if math.isinf(interval.high) or interval.low <= 0:
        return "too noisy to say"
    low, high = math.log(interval.low), math.log(interval.high)
    if not higher_is_better:
        low, high = -high, -low
    if high < -noise:
        return "slower"
    if low > noise:
        return "faster"
    return "not slower" if low >= -limit else "too noisy to say"
