"""`AblationResult`: everything that an ablation found, as a folder; tables and reports are made of it alone.

    ablation.json                   the specification, the cells, what is known of their tokens and of which repeats, what broke
    runs/SCENARIO/CELL/REPEAT/      one `Run` each
    broken/SCENARIO/CELL/REPEAT/    of a run that its engine ended, what there is of it

Must not know: engines, how it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from octavo.bench.ablation.agreement import Outputs
from octavo.bench.ablation.breakdown import Breakdown
from octavo.bench.ablation.measures import Measure, find_measure
from octavo.bench.ablation.spec import AGAIN, AblationSpec
from octavo.bench.intervals import Interval, Verdict, ratio_interval, verdict
from octavo.bench.records import RequestRecord
from octavo.bench.runs import Run, is_complete
from octavo.bench.schema import migrated
from octavo.bench.self_checks import TWICE, Checked, a_a, run_checks
from octavo.bench.whole_files import write_whole
from octavo.core.errors import ResultError

SCHEMA_VERSION = 2


def _all_compared(content: dict[str, Any]) -> dict[str, Any]:
    """Version 1 did not say at first which repeats' tokens were compared: all of a finished ablation; of another one that is not known.

    What is not known to be compared is in no ratio until `--resume` has compared it.
    """
    repeats = list(range(content["spec"]["repeats"])) if content["finished"] else []
    return {"compared": dict.fromkeys(content["outputs"], repeats)} | content


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _all_compared}  # of ablation.json; its runs have their own
FILE = "ablation.json"
NOT_YET = "its tokens are not compared yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellInfo:
    """A cell as it ran in one scenario."""

    name: str
    parent: str | None
    change: str  # "" for a baseline
    stack: str
    pool_slots: int
    pool_bytes: int
    options: dict[str, Any]  # of its plugins and engine, by section
    left_out: str = ""  # why it did not run here


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measure of a cell against its parent's, over paired repeats."""

    scenario: str
    cell: str
    parent: str
    measure: str
    interval: Interval | None  # None: there is no ratio, for the reason in `problem`
    floor: Interval | None
    verdict: Verdict
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class AblationResult:
    """What is kept of an ablation. `runs` by (scenario, cell, repeat); a run that broke is in `broken` instead."""

    spec: AblationSpec
    cells: dict[str, list[CellInfo]] = field(default_factory=dict)  # by scenario, parents first, the noise floor last
    runs: dict[tuple[str, str, int], Run] = field(default_factory=dict)
    outputs: dict[str, dict[str, Outputs]] = field(default_factory=dict)  # by scenario and cell
    compared: dict[str, list[int]] = field(default_factory=dict)  # repeats whose tokens `outputs` tells of, by scenario
    referenced: dict[str, list[int]] = field(default_factory=dict)  # of these, where baselines were put to the reference in fp32
    breakdowns: dict[str, dict[str, Breakdown]] = field(default_factory=dict)  # by scenario and cell
    broken: dict[str, str] = field(default_factory=dict)  # "scenario/cell/repeat": why that run ended
    finished: bool = False

    # ------------------------------------------------------------------ findings

    def cell(self, scenario: str, name: str) -> CellInfo:
        """By name."""
        return next(cell for cell in self.cells[scenario] if cell.name == name)

    def of(self, scenario: str, cell: str) -> list[Run]:
        """Its repeats, in order."""
        return [self.runs[key] for key in sorted(self.runs) if key[:2] == (scenario, cell)]

    def broken_repeats(self, scenario: str, cell: str) -> list[int]:
        """Those whose run ended with an error, and left nothing."""
        return [repeat for repeat in range(self.spec.repeats) if f"{scenario}/{cell}/{repeat}" in self.broken]

    def lost(self, scenario: str, cell: str) -> list[Run]:
        """Of the repeats that broke, what was asked for and has no answer.

        The work is that of another cell in the same repeat, or, where none has it, as many requests of another repeat.
        """
        works = {repeat: run.work for (s, _, repeat), run in self.runs.items() if s == scenario}
        found = []
        for repeat in self.broken_repeats(scenario, cell) if works else ():
            work = works.get(repeat, next(iter(works.values())))
            reason = self.broken[f"{scenario}/{cell}/{repeat}"]
            records = [RequestRecord.of_broken_run(work, index, reason) for index in range(len(work.items))]
            found.append(Run(work=work, records=records, complete=False, stopped_by=reason))
        return found

    def values(self, scenario: str, cell: str, measure: Measure) -> dict[int, float]:
        """By repeat."""
        return {repeat: measure(run.records) for (s, c, repeat), run in sorted(self.runs.items()) if (s, c) == (scenario, cell)}

    def pairs(self, scenario: str, cell: str, parent: str) -> list[int]:
        """The repeats that both have and whose tokens were compared: those that a ratio may be of."""
        return [
            repeat
            for repeat in sorted(self.compared.get(scenario, ()))
            if (scenario, cell, repeat) in self.runs and (scenario, parent, repeat) in self.runs
        ]

    def holds(self, scenario: str, cell: str) -> bool:
        """Its outputs and those of all its ancestors are what they must be: speeds may be compared."""
        outputs = self.outputs.get(scenario, {}).get(cell)
        parent = self.cell(scenario, cell).parent
        return outputs is not None and outputs.hold and (parent is None or self.holds(scenario, parent))

    def _is_compared(self, scenario: str, cell: str) -> bool:
        """Its outputs and those of all its ancestors are known."""
        parent = self.cell(scenario, cell).parent
        return cell in self.outputs.get(scenario, {}) and (parent is None or self._is_compared(scenario, parent))

    @property
    def tokens_agree(self) -> bool:
        """No cell gave other tokens than its parent, as far as they were compared."""
        return all(outputs.agree for cells in self.outputs.values() for outputs in cells.values())

    @property
    def tokens_hold(self) -> bool:
        """And of no cell an answer is missing that its parent has, or the other way round."""
        return all(outputs.hold for cells in self.outputs.values() for outputs in cells.values())

    def checks(self) -> dict[str, list[Checked]]:
        """By "scenario/cell/repeat" every self-check of that run, and by scenario those of its baseline against itself."""
        found = {scenario: self._twice(scenario) for scenario in self.cells}
        return found | {"/".join(map(str, key)): run_checks(run) for key, run in sorted(self.runs.items())}

    def failed_checks(self, *, of_time: bool) -> dict[str, list[str]]:
        """Of `checks`, what does not hold. Those `of_time` may be the machine's doing, others never are."""
        found = {
            where: [f"{one.check}: {one.problem}" for one in checks if one.problem and one.of_time is of_time]
            for where, checks in self.checks().items()
        }
        return {where: problems for where, problems in found.items() if problems}

    def unsteady(self, scenario: str) -> list[str]:
        """By how much the baseline differs from itself, in each measure that is compared and in which it is more than 3 %."""
        return [one.problem for one in self._twice(scenario) if one.problem]

    def _twice(self, scenario: str) -> list[Checked]:
        again = self._again(scenario)
        if again is None:
            return [Checked(TWICE, not_applicable="the baseline was not run twice")]
        found = []
        for measure in map(find_measure, self.spec.compared):
            one, other = (self.values(scenario, name, measure) for name in (str(again.parent), again.name))
            if both := sorted(one.keys() & other.keys()):
                problem = a_a([one[repeat] for repeat in both], [other[repeat] for repeat in both], what=measure.name)
                found.append(Checked(TWICE, problem=problem or ""))
            else:
                found.append(Checked(TWICE, not_applicable=f"no repeat of both has run: {measure.name}"))
        return found

    def _again(self, scenario: str) -> CellInfo | None:
        """The baseline's second run."""
        return next((cell for cell in self.cells.get(scenario, []) if cell.name.endswith(AGAIN) and cell.parent is not None), None)

    def comparisons(self, scenario: str, *, measures: Sequence[str] | None = None) -> list[Comparison]:
        """Every cell that has a parent, in these measures (default: the specification's); the noise floor's own is the last."""
        measured = [find_measure(name) for name in measures or self.spec.compared]
        floors = {measure.name: self._floor(scenario, measure) for measure in measured}
        pairs = [cell for cell in self.cells.get(scenario, []) if cell.parent is not None and not cell.left_out]
        return [self._compare(scenario, cell, measure, floors[measure.name]) for cell in pairs for measure in measured]

    def _floor(self, scenario: str, measure: Measure) -> tuple[Interval | None, str]:
        again = self._again(scenario)
        if again is None:
            return None, "the baseline was not run twice"
        return self._interval(scenario, again.name, str(again.parent), measure)

    def _compare(self, scenario: str, cell: CellInfo, measure: Measure, noise: tuple[Interval | None, str]) -> Comparison:
        parent, (floor, no_floor) = str(cell.parent), noise
        interval, problem = None, self._broke(scenario, cell.name, parent) or NOT_YET
        if self.holds(scenario, cell.name):
            interval, problem = self._interval(scenario, cell.name, parent, measure)
        elif self._is_compared(scenario, cell.name):
            problem = self._why_not(scenario, cell.name)
        if interval is not None and floor is None:
            problem = f"there is no noise floor: {no_floor}"
        found: Verdict = "too noisy to say"
        if interval is not None and floor is not None:
            found = verdict(interval, floor, higher_is_better=measure.higher_is_better)
        return Comparison(
            scenario=scenario,
            cell=cell.name,
            parent=parent,
            measure=measure.name,
            interval=interval,
            floor=floor,
            verdict=found,
            problem=problem,
        )

    def _why_not(self, scenario: str, cell: str) -> str:
        """Of a cell that was compared, why its outputs or an ancestor's are not what they must be."""
        found, parent = self.outputs[scenario][cell], self.cell(scenario, cell).parent
        if found.hold and parent is not None:
            return self._why_not(scenario, parent)
        return f"tokens cannot be compared: {found.missing}" if found.agree else "its tokens are not the parent's"

    def _interval(self, scenario: str, cell: str, parent: str, measure: Measure) -> tuple[Interval | None, str]:
        """Over the repeats that both have; none where one of them broke in a repeat, since those that did not are a choice of the best."""
        if problem := self._broke(scenario, cell, parent):
            return None, problem
        mine, theirs = self.values(scenario, cell, measure), self.values(scenario, parent, measure)
        if not mine.keys() & theirs.keys():
            return None, "no repeat that both have"
        both = self.pairs(scenario, cell, parent)
        if not both:
            return None, NOT_YET
        lost, parents = self._failures(scenario, cell, both), self._failures(scenario, parent, both)
        if lost > parents:  # who fails has less to do, and rates and gaps are of those that were answered
            return None, f"{lost} requests failed, {parents} of the parent's did"
        try:
            return ratio_interval([mine[r] for r in both], [theirs[r] for r in both], seed=self.spec.seed), ""
        except ValueError:
            return None, f"{measure.name} is not a number above 0 in every repeat (requests failed, or there are none of that class)"

    def _broke(self, scenario: str, cell: str, parent: str) -> str:
        """How many repeats of either broke, in words; empty if none did."""
        counts = [(len(self.broken_repeats(scenario, name)), name) for name in (cell, parent)]
        return ", ".join(f"{count} repeat{'s' * (count > 1)} of {name} broke" for count, name in counts if count)

    def _failures(self, scenario: str, cell: str, repeats: Sequence[int]) -> int:
        return sum(not record.succeeded for repeat in repeats for record in self.runs[scenario, cell, repeat].records)

    # -------------------------------------------------------------------- a folder

    def save(self, folder: str | Path) -> None:
        """Write all but the runs, which are written as each ends; with each cell whether it `holds`, for readers without Octavo."""
        cells = {
            scenario: [told | {"holds": self.holds(scenario, told["name"])} for told in each]
            for scenario, each in _CELLS.dump_python(self.cells, mode="json").items()
        }
        content = {
            "schema_version": SCHEMA_VERSION,
            "spec": self.spec.model_dump(mode="json"),
            "cells": cells,
            "outputs": _OUTPUTS.dump_python(self.outputs, mode="json"),
            "compared": self.compared,
            "referenced": self.referenced,
            "breakdowns": _BREAKDOWNS.dump_python(self.breakdowns, mode="json"),
            "broken": self.broken,
            "finished": self.finished,
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_whole(Path(folder) / FILE, json.dumps(content, indent=1) + "\n")

    def add(self, folder: str | Path, key: tuple[str, str, int], run: Run) -> None:
        """Keep a run, here and in the folder."""
        run.save(run_folder(folder, key))
        self.runs[key] = run

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a folder, finished or not. Raises ResultError where it is none, or of a newer version."""
        folder = Path(folder)
        content = _read(folder / FILE)
        compared = dict(content["compared"])
        result = cls(
            spec=AblationSpec.model_validate(content["spec"]),
            cells=_CELLS.validate_python(content["cells"]),
            outputs=_OUTPUTS.validate_python(content["outputs"]),
            compared=compared,
            referenced=dict(content.get("referenced", {name: repeats[:1] for name, repeats in compared.items()})),
            breakdowns=_BREAKDOWNS.validate_python(content["breakdowns"]),
            broken=dict(content["broken"]),
            finished=bool(content["finished"]),
        )
        for scenario, cells in result.cells.items():
            for cell in cells:
                for repeat in range(result.spec.repeats):
                    if is_complete(run := run_folder(folder, (scenario, cell.name, repeat))):
                        result.runs[scenario, cell.name, repeat] = Run.load(run)
        return result


_CELLS = TypeAdapter(dict[str, list[CellInfo]])
_OUTPUTS = TypeAdapter(dict[str, dict[str, Outputs]])
_BREAKDOWNS = TypeAdapter(dict[str, dict[str, Breakdown]])


def run_folder(folder: str | Path, key: tuple[str, str, int], *, among: str = "runs") -> Path:
    """Where a run is kept; `among` "broken" ones, where what is left of it is."""
    scenario, cell, repeat = key
    return Path(folder) / among / scenario / cell / str(repeat)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path.parent} is no result of octavo ablate: {path.name} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ResultError(f"{path} is damaged: it holds no table")
    try:
        content = migrated(content, MIGRATIONS, where=path, to=SCHEMA_VERSION, header=lambda content: content)
        AblationSpec.model_validate(content.get("spec"))
    except (ValidationError, KeyError, TypeError) as error:
        raise ResultError(f"{path} is damaged: {error}") from error
    return dict(content)
