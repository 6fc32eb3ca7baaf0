"""Results written by hand, with figures that a pencil can check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.bench.ablation.agreement import Agreement, Divergence, Outputs
from octavo.bench.ablation.result import AblationResult, CellInfo
from octavo.bench.ablation.spec import AGAIN, AblationSpec
from octavo.bench.records import RequestRecord
from octavo.bench.runs import Run
from octavo.bench.step_log import StepLine
from octavo.bench.work import Item, Work
from octavo.core.kv import KVStats, KVUsage

SAME = Outputs(exact=Agreement(compared=2, equal=2))
OTHER = Outputs(
    exact=Agreement(
        compared=2, equal=1, divergences=(Divergence(index=1, seed=0, position=3, expected=5, got=6, distance=0.5),), left_out=1
    )
)
USAGE = KVUsage(filled=20, held=10, external=0, cached=0, free=70)


def step(start: float, end: float, *, rows: int = 2, tokens: int = 2, forward: float | None = None, **fields: Any) -> StepLine:
    """A step; with more tokens than rows it computes a prompt."""
    seconds = {"forward": end - start if forward is None else forward, "schedule": 0.0}
    known = {"num_waiting": 0, "num_running": rows, "idle_rows": 0, "num_recomputed": 0, "num_drafted": 0, "num_accepted": 0}
    known |= {"num_context": 0, "num_pairs": 0, "num_preempted": 0, "num_failed": 0}
    return StepLine(
        **{
            "step": 0,
            "start": start,
            "end": end,
            "seconds": seconds,
            "num_rows": rows,
            "num_tokens": tokens,
            "num_sampled": rows,
            "transfers": {},
            "usage": USAGE,
            "usage_running": USAGE,
            "stats": KVStats(),
            **known,
            **fields,
        }
    )


def record(index: int, *times: float, class_name: str = "default", **fields: Any) -> RequestRecord:
    """Sent at 0; with token times it is answered, without it failed."""
    known = {"num_prompt_tokens": 100, "max_tokens": 3, "due": 0.0, "sent": 0.0, "ended": times[-1] if times else 1.0}
    known |= {"finish_reason": "length" if times else "error", "token_ids": [1] * len(times), "first_scheduled": 0.0}
    return RequestRecord(index=index, class_name=class_name, token_times=list(times), **(known | fields))


def made_run(seconds: float, *, records: Sequence[RequestRecord] = (), steps: Sequence[StepLine] = ()) -> Run:
    """Two answers of three tokens each, the last one after so many seconds; unless something else is given."""
    records = records or [record(0, seconds / 4, seconds / 2, seconds), record(1, seconds / 4, seconds / 2, seconds)]
    steps = steps or [step(0.0, seconds / 4, tokens=200), step(seconds / 4, seconds / 2), step(seconds / 2, seconds)]
    return Run(work=Work(name="w", items=[Item(prompt=(1,), output_len=3)] * 2), records=list(records), steps=list(steps))


def made(
    durations: dict[str, Sequence[float]], *, parents: dict[str, str], outputs: dict[str, Outputs] | None = None, **fields: Any
) -> AblationResult:
    """A result in which each cell's repeats took so many seconds; the first cell is the baseline."""
    cells = {name: {"parent": parents[name]} if name in parents else {} for name in durations if not name.endswith(AGAIN)}
    workload = {"kind": "random", "count": 2, "input_len": 100}
    spec = AblationSpec.model_validate(
        {"name": "made", "scenarios": {"s": {"workload": workload, "load": {"concurrency": 2}}}, "cells": cells, **fields}
    )
    infos = [
        CellInfo(
            name=name,
            parent=parents.get(name),
            change="part: a -> b" if name in parents and not name.endswith(AGAIN) else "",
            stack="s + a + k + o + m",
            pool_slots=100,
            pool_bytes=1 << 20,
            options={"engine": {"max_model_len": 64}},
        )
        for name in durations
    ]
    runs = {("s", name, repeat): made_run(one) for name, each in durations.items() for repeat, one in enumerate(each)}
    found = dict.fromkeys(durations, SAME) | (outputs or {})
    return AblationResult(
        spec=spec, cells={"s": infos}, runs=runs, outputs={"s": found}, compared={"s": list(range(spec.repeats))}, finished=True
    )


PARENTS = {"fast": "base", f"base{AGAIN}": "base"}
BASE, FAST, AGAIN_TOO = [4.0, 4.04, 3.96], [2.0, 2.05, 1.95], [4.02, 4.0, 3.98]


def twice_as_fast(**fields: Any) -> AblationResult:
    """A baseline, the same again, and a cell that takes half the time; 1 % noise."""
    return made({"base": BASE, "fast": FAST, f"base{AGAIN}": AGAIN_TOO}, parents=PARENTS, **fields)
