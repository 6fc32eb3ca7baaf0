"""Where a step's time goes, and how near each part is to what this machine can do, as a page: `python -m octavo.bench.profile`.

    python -m octavo.bench.profile [--rows 1 8 64] [--prompts 512 4000] [--out docs/benchmarks/profile-cpu.md]

A case is a batch that decodes, or a prompt. Each is run several times with timers around attention, linears and head (see `step_parts`),
and as often without, in turn. Ops that run all layers in one call run them one by one where they are timed: the page has what a step takes
without timers beside the parts. Bounds are those of `roofline`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from tqdm import tqdm

from octavo.bench.drive import drive
from octavo.bench.reports.drawing import Fill
from octavo.bench.reports.shares import share_bars
from octavo.bench.roofline import CostModel, Limits, cost_model, measure_limits
from octavo.bench.step_log import StepLine, StepLog
from octavo.bench.step_parts import ForwardParts, StepParts, timed_parts
from octavo.bench.whole_files import write_whole
from octavo.bench.work import Work
from octavo.bench.workloads import make_work
from octavo.core.engine import Engine
from octavo.core.errors import OctavoError
from octavo.core.processor import cpu_name
from octavo.llm import LLM

CONTEXT, STEPS = 256, 32  # of a decoding row: its prompt, and the steps that are looked at
BUDGET = 2048  # tokens of a step: the default of schedulers that cut prompts. More for more rows: half of it is left for prompts
BLOCK = 16  # slots that a sequence's last block may leave empty

PARTS = {
    "schedule": Fill("#7a3b69"),
    "inputs": Fill("#d08bb9", "////"),
    "attention": Fill("#17456b"),
    "linears": Fill("#2f8a5b"),
    "head": Fill("#a7cfc8", "---"),
    "rest": Fill("#eba06e", "\\\\\\\\"),
    "sample": Fill("#c8503c"),
    "apply": Fill("#f0e2a8", ".."),
    "between": Fill("#8a8a8a", "xx"),
}
"""In the order of a step. `rest`: embedding, last norm, what lies between calls; `between`: of the step, what no part counts."""

BOUNDED = ("attention", "linears", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is run: `work` in an engine without anything else, and which of its steps are looked at."""

    name: str
    work: Work
    decoding: int = 0  # rows; 0: the prompt's steps, added up

    def steps(self, lines: Iterable[StepLine]) -> list[StepLine]:
        """Those that are looked at: of rows that decode the last STEPS. Raises RuntimeError where there are fewer, or none."""
        rows = self.decoding
        found = [line for line in lines if (line.num_rows == line.num_tokens == rows if rows else line.num_tokens > 1)]
        if len(found) < (STEPS if rows else 1):
            raise RuntimeError(f"{self.name}: {len(found)} steps were of this kind, too few; is the KV pool large enough?")
        return found[-STEPS:] if rows else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Of a case, seconds of a step, or of a whole prompt."""

    case: Case
    seconds: Mapping[str, float]  # by part, with timers
    without: float  # the whole, without timers
    bounds: Mapping[str, float]  # the least that the parts of BOUNDED can take
    memory_bound: Mapping[str, bool]  # whether it is bandwidth that binds

    @property
    def total(self) -> float:
        """The whole, with timers."""
        return sum(self.seconds.values())

    @property
    def left(self) -> dict[str, float]:
        """By part, the seconds above its bound, from the largest; parts without a bound are all left."""
        left = {name: seconds - self.bounds.get(name, 0.0) for name, seconds in self.seconds.items()}
        return dict(sorted(left.items(), key=lambda pair: -pair[1]))


def decoding(rows: int, vocab_size: int, *, budget: int) -> Case:
    """So many rows of CONTEXT positions and more that decode. `budget` is what a step has of tokens: see `output_len`."""
    work = make_work("random", count=rows, vocab_size=vocab_size, options={"input_len": CONTEXT, "output_len": output_len(rows, budget)})
    return Case(name=f"{rows} row{'s' * (rows > 1)}", work=work, decoding=rows)


def output_len(rows: int, budget: int) -> int:
    """Tokens of each row, so that all of them decode in STEPS steps: the first ones decode while prompts of others take what is left."""
    return STEPS + 2 + math.ceil(rows * CONTEXT / max(1, budget - rows))


def prompt(length: int, vocab_size: int) -> Case:
    """One prompt, to its first token."""
    work = make_work("random", count=1, vocab_size=vocab_size, options={"input_len": length, "output_len": 1})
    return Case(name=f"prompt of {length:,}", work=work)


def profile(engine: Engine, case: Case, *, costs: CostModel, limits: Limits, repeats: int) -> Profile:
    """Run it with timers and without, in turn; a first run of each does not count. What is kept is the median repeat.

    Raises RuntimeError where too few steps were of its kind.
    """
    timed, without = list[dict[str, float]](), list[float]()
    for number in range(-1, repeats):
        whole, _ = _run(engine, case, nullcontext(StepParts()))
        seconds, lines = _run(engine, case, timed_parts(engine))
        if number >= 0:
            without.append(sum(whole.values()))
            timed.append(seconds)
    costs_of = [costs.parts(line) for line in lines]
    share = len(lines) if case.decoding else 1
    return Profile(
        case=case,
        seconds=sorted(timed, key=lambda parts: sum(parts.values()))[(repeats - 1) // 2],
        without=median(without),
        bounds={name: sum(cost[name].seconds(limits) for cost in costs_of) / share for name in BOUNDED},
        memory_bound={
            name: sum(cost[name].num_bytes for cost in costs_of) / limits.bandwidth
            >= sum(cost[name].flops for cost in costs_of) / limits.flops
            for name in BOUNDED
        },
    )


def _run(engine: Engine, case: Case, timers: AbstractContextManager[StepParts]) -> tuple[dict[str, float], list[StepLine]]:
    """Seconds by part, of a step or of the whole prompt; and the steps that they are of."""
    engine.kv.reset()
    log = StepLog(engine.clock.now())
    with log.watching(engine), timers as parts:
        drive(engine, case.work)
    lines = case.steps(log.lines)
    forward = {step: (split, head) for (step, split), head in zip(parts.steps, parts.heads, strict=True)}
    found = dict.fromkeys(PARTS, 0.0)
    for line in lines:
        split, head = forward.get(line.step, (ForwardParts(attention=0, linear=0, rest=line.seconds["forward"]), 0.0))
        known = {name: line.seconds.get(name, 0.0) for name in ("schedule", "inputs", "sample", "apply")}
        known |= {"attention": split.attention, "linears": split.linear - head, "head": head, "rest": split.rest}
        known["between"] = max(0.0, line.end - line.start - sum(known.values()))
        for name, seconds in known.items():
            found[name] += seconds / (len(lines) if case.decoding else 1)
    return found, lines


def page(profiles: Sequence[Profile], limits: Limits, *, about: str, figure: str) -> str:
    """Markdown."""
    lines = [
        "# Where a step's time goes on a CPU",
        "",
        f"{about} Seen here: {limits.bandwidth / 1e9:.1f} GB/s of reading, {limits.flops / 1e9:.0f} GFLOP/s in a large {limits.dtype} "
        f"product of PyTorch's; from {limits.ridge_batch:.1f} tokens a step on arithmetic binds. Rows decode after {CONTEXT} positions or "
        "more; a step of theirs is the mean of a run, a prompt is all of its steps. Of several runs the median is shown. Written by "
        "`python -m octavo.bench.profile`.",
        "",
        "Parts are timed in runs of their own. `all, untimed` is the same step in runs without timers. What lies between it and `all` are "
        "the timers, and Python's way through the layers: where ops run all layers of a step in one native call, timers have them run "
        "one by one, since within a call nothing can be timed. It is in no bound, and no user waits for it.",
        "",
        "A bound is the least that a part can take: the bytes that it reads at that speed, or its operations at that speed, whichever is "
        "longer. A share above 100 % is a part that does better than PyTorch's own loop does. `linears` holds what is fused with them: "
        "norms, RoPE, activations, residuals. `rest` is the embedding, the last norm and what lies between calls; `between` is of a step "
        "what no timer saw. Neither these nor the host's parts have a bound.",
        "",
        f"![Where a step's time goes, in percent of it, and the bounds beneath]({figure})",
        "",
    ]
    for found in profiles:
        lines += _section(found)
    return "\n".join(lines).rstrip() + "\n"


def _section(found: Profile) -> list[str]:
    total = found.total
    lines = [
        f"## {found.case.name[0].upper()}{found.case.name[1:]}",
        "",
        f"{found.without * 1e3:.2f} ms, with timers {total * 1e3:.2f} ms. {_left(found)}",
        "",
        "| part | ms | share | bound, ms | share of bound | bound by |",
        "|---|---|---|---|---|---|",
    ]
    for name, seconds in found.seconds.items():
        bound = ("", "", "")
        if name in found.bounds and seconds:
            binds = "memory" if found.memory_bound[name] else "arithmetic"
            bound = f"{found.bounds[name] * 1e3:.2f}", f"{found.bounds[name] / seconds:.0%}", binds
        lines.append(f"| {name} | {seconds * 1e3:.2f} | {seconds / total:.1%} | {' | '.join(bound)} |")
    least = sum(found.bounds.values())
    return [
        *lines,
        f"| all | {total * 1e3:.2f} | 100.0% | {least * 1e3:.2f} | {least / total:.0%} | |",
        f"| all, untimed | {found.without * 1e3:.2f} | | {least * 1e3:.2f} | {least / found.without:.0%} | |",
        "",
    ]


def _left(found: Profile) -> str:
    """Which part is left: the most time above the bounds."""
    left = {name: seconds for name, seconds in found.left.items() if seconds > 0}
    if not left:
        return "Nothing is left above the bounds."
    named = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in list(left.items())[:3])
    return f"Left above the bounds, from the largest: {named}."


def plot(profiles: Sequence[Profile]) -> str:
    """SVG: a bar for each case, and beneath it one of what its bounds would leave."""
    bars: dict[str, dict[str, float]] = {}
    for found in profiles:
        bars[f"{found.case.name}, {found.total * 1e3:.1f} ms"] = {name: 100 * s / found.total for name, s in found.seconds.items()}
        bars["bounds" + "\u200b" * len(bars)] = {name: 100 * s / found.total for name, s in found.bounds.items()}
    return share_bars(bars, PARTS, unit="share of the time with timers")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the page and its figure."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.profile", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="as of LLM (default: SmolLM2-135M)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations (default: bfloat16)")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64], help="rows that decode (default: 1 8 64)")
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 4000], help="lengths of prompts (default: 512 4000)")
    parser.add_argument("--repeats", type=int, default=3, help="of each case, with timers and without (default: 3)")
    parser.add_argument("--threads", type=int, help="that compute (default: as of LLM)")
    parser.add_argument("--out", type=Path, metavar="FILE.md", default=Path("profile-cpu.md"), help="the page; its figure lies beside it")
    args = parser.parse_args(argv)
    if args.repeats < 1 or min((*args.rows, *args.prompts), default=0) < 1:
        parser.error("--rows, --prompts and --repeats take numbers above 0, and there must be a case")
    most = max(args.rows, default=1)
    budget = max(BUDGET, 2 * most)
    sequence = CONTEXT + max((output_len(rows, budget) for rows in args.rows), default=1)
    longest = max(sequence, *(length + 1 for length in args.prompts), 0)
    slots = max(most * (sequence + BLOCK), longest + BLOCK)
    try:
        llm = LLM(
            args.model,
            device="cpu",
            dtype=args.dtype,
            max_model_len=longest,
            num_kv_slots=slots,
            max_num_seqs=most,
            max_num_batched_tokens=budget,
            num_threads=args.threads,
        )
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with llm:
        loaded = llm.built.loaded
        vocab_size, costs = loaded.shape.vocab_size, cost_model(loaded)
        cases = [decoding(rows, vocab_size, budget=budget) for rows in args.rows]
        cases += [prompt(length, vocab_size) for length in args.prompts]
        limits = measure_limits("cpu", loaded.facts.dtype)
        shown = tqdm(cases, unit="case", disable=None)
        try:
            profiles = [profile(llm.engine, case, costs=costs, limits=limits, repeats=args.repeats) for case in shown]
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        about = (
            f"{loaded.source.name} in {loaded.facts.dtype} on {cpu_name()}, {os.cpu_count()} cores, {llm.built.num_threads} threads, "
            f"{datetime.now(UTC).date().isoformat()}; stack {' + '.join(llm.built.config.stack.names.values())}."
        )
    figure = args.out.with_suffix(".svg")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(figure, plot(profiles))
        write_whole(args.out, page(profiles, limits, about=about, figure=figure.name))
    except OSError as error:
        print(f"error: {args.out} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"written: {args.out} and {figure}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
