"""A run that was stopped and gone on with: what is left of its work, how a later part is put to the earlier ones, and each part alone.

The run's clock stands still between two parts: what a later one times begins where the one before ended. A request that was under way at
the stop is asked again; what it came to is kept with its part, since the engine's steps ran for it too.
Must not know: how a part is measured, files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from octavo.bench.records import RequestRecord
from octavo.bench.runs import Part, Run, sum_known
from octavo.bench.step_log import StepLine
from octavo.bench.work import Item, Work, prompt_of
from octavo.core.errors import ResultError
from octavo.core.kv import BlockEvent, KVStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What has no record yet, as a work of its own: `indices[i]` is the place of its item i in the whole."""

    work: Work
    indices: list[int]


def rest_of(run: Run) -> Rest:
    """The items of a stopped run that are still to be asked, at the times at which they are due after the stop.

    A turn whose turn before is answered begins with all that was said. Raises ResultError where the tokens of that answer are not known.
    """
    items, stopped = run.work.items, run.duration
    done = {record.index: record for record in run.records if not record.cut_short}
    answers = {index: record.token_ids for index, record in done.items() if record.token_ids}
    # In a closed loop what stands first is asked first: conversations that were begun.
    left = sorted(set(range(len(items))) - done.keys(), key=lambda index: (items[index].after not in done, index))
    place = {index: at for at, index in enumerate(left)}

    def rest(index: int) -> Item:
        item = items[index]
        if item.after is None or item.after in place:
            return replace(item, at=max(0.0, item.at - stopped), after=None if item.after is None else place[item.after])
        if item.after not in answers:
            raise ResultError(
                f"item {index} goes on from an answer whose token ids are not known: such a run cannot be gone on with, measure it anew"
            )
        due = max(item.at, done[item.after].ended + item.pause)
        prompt = tuple(prompt_of(run.work, index, answers))
        return replace(item, prompt=prompt, at=max(0.0, due - stopped), after=None, pause=0.0)

    return Rest(work=replace(run.work, items=[rest(index) for index in left]), indices=left)


def joined(run: Run, later: Run, rest: Rest) -> Run:
    """Both as one run; `later` is of the rest of `run`. What it was measured with is the first part's; the larger peak of memory counts."""
    stopped = run.duration
    parts = [*(run.parts or [Part(start=0.0, first_step=0, date=_date(run))])]
    parts[-1] = replace(parts[-1], cut_short=tuple(record for record in run.records if record.cut_short))
    parts.append(Part(start=stopped, first_step=len(run.steps), date=_date(later)))
    records = [record for record in run.records if not record.cut_short]
    records += [_at_its_place(record, rest.indices, stopped) for record in later.records]
    memory = max((one.memory for one in (run, later) if one.memory is not None), key=lambda table: table.peak, default=None)
    counted = {name: sum_known(value, later.counted.get(name)) for name, value in run.counted.items()}
    return replace(
        run,
        records=sorted(records, key=lambda record: record.index),
        steps=[*run.steps, *_later_steps(run.steps, later.steps, rest.indices, stopped)],
        memory=memory,
        counted=counted,
        parts=parts,
        complete=later.complete,
        stopped_by=later.stopped_by,
        failed=later.failed,
    )


def apart(run: Run) -> list[Run]:
    """Each part as a run of its own from 0 on, with the requests that were cut short at its end; all but the last one are not complete."""
    if not run.parts:
        return [run]
    found = []
    for number, part in enumerate(run.parts):
        following = run.parts[number + 1] if number + 1 < len(run.parts) else None
        records = [one for one in run.records if one.ended > part.start or (number == 0 and one.ended == part.start)]
        steps = run.steps[part.first_step :]
        if following is not None:
            records = [one for one in records if one.ended <= following.start]
            steps = run.steps[part.first_step : following.first_step]
        before = run.steps[part.first_step - 1].stats if part.first_step else KVStats()
        found.append(
            replace(
                run,
                records=[_shifted(record, -part.start) for record in (*records, *part.cut_short)],
                steps=[_shifted_step(line, -part.start, stats=_less(line.stats, before)) for line in steps],
                parts=[],
                complete=run.complete and following is None,
            )
        )
    return found


def _date(run: Run) -> str:
    return run.identity.date if run.identity is not None else run.server.date if run.server is not None else ""


def _at_its_place(record: RequestRecord, indices: Sequence[int], stopped: float) -> RequestRecord:
    error = re.sub(r"(?<=^not sent: item )\d+", lambda found: str(indices[int(found[0])]), record.error)
    return replace(_shifted(record, stopped), index=indices[record.index], error=error)


def _shifted(record: RequestRecord, by: float) -> RequestRecord:
    return replace(
        record,
        due=record.due + by,
        sent=record.sent + by,
        ended=record.ended + by,
        token_times=[time + by for time in record.token_times],
        first_scheduled=None if record.first_scheduled is None else record.first_scheduled + by,
        added=None if record.added is None else record.added + by,
    )


def _later_steps(earlier: Sequence[StepLine], later: Sequence[StepLine], indices: Sequence[int], stopped: float) -> list[StepLine]:
    """Steps of an engine of its own, as if it were the earlier one: numbers and counts go on, and blocks belong to the whole's items."""
    number, stats = (earlier[-1].step + 1, earlier[-1].stats) if earlier else (0, KVStats())
    return [
        replace(
            _shifted_step(line, stopped, stats=_more(line.stats, stats)),
            step=number + line.step,
            events=tuple(_of_the_whole(event, indices) for event in line.events),
        )
        for line in later
    ]


def _shifted_step(line: StepLine, by: float, *, stats: KVStats) -> StepLine:
    return replace(line, start=line.start + by, end=line.end + by, stats=stats)


def _of_the_whole(event: BlockEvent, indices: Sequence[int]) -> BlockEvent:
    index, slash, sequence = event.owner.partition("/")
    return replace(event, owner=f"{indices[int(index)]}{slash}{sequence}") if index else event


def _more(one: KVStats, other: KVStats) -> KVStats:
    return KVStats(*(getattr(one, field.name) + getattr(other, field.name) for field in fields(KVStats)))


def _less(one: KVStats, other: KVStats) -> KVStats:
    return KVStats(*(getattr(one, field.name) - getattr(other, field.name) for field in fields(KVStats)))
