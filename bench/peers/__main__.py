"""Octavo beside vLLM, llama.cpp and Hugging Face on this machine, as a page: see docs/howto/benchmark.md.

python -m octavo.bench.peers --vllm /path/to/venv [--llama-cpp /path/to/venv] [--rounds 5] [--rows mixed one] [--out FILE.md]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

from octavo.bench.peers.claims import MEMORY, OCTAVO, ROWS, START, engines_of
from octavo.bench.peers.contenders import Files, chosen, contenders, find_files
from octavo.bench.peers.forecast import Forecast, about
from octavo.bench.peers.measure import Turns
from octavo.bench.peers.outcome import Outcome
from octavo.bench.peers.page import page
from octavo.bench.peers.tasks import Task, make_tasks
from octavo.bench.peers.worker import Contender, environment
from octavo.bench.startup import StartupError, start_once
from octavo.bench.whole_files import write_whole
from octavo.core.errors import OctavoError
from octavo.core.processor import cpu_name


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the page and the figures. Status 1 where nothing could be measured, 130 after Ctrl-C, with what there was."""
    args = _parser().parse_args(argv)
    begun = time.monotonic()
    try:
        files = find_files(args.model, report=lambda line: print(line, file=sys.stderr))
        tasks = make_tasks(files.vocab_size, seed=args.seed, scale=args.scale)
        plan = [(tasks[name], engines) for name, engines in engines_of(args.rows).items()]
        longest = max((task.longest for task, _ in plan), default=1)
        found = contenders(files, longest=longest, threads=args.threads, vllm=args.vllm, llama_cpp=args.llama_cpp)
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    names = list(dict.fromkeys(name for _, engines in plan for name in engines))
    if START.row in args.rows:
        names = list(dict.fromkeys((*names, START.ours, START.peer)))
    can, cannot = chosen(found, names)
    outcome = Outcome(
        settings={"rows": args.rows, "rounds": args.rounds, "threads": args.threads, "seed": args.seed, "scale": args.scale},
        identity=_identity(files),
        problems=cannot,
    )
    status = 0
    try:
        with tempfile.TemporaryDirectory() as logs:
            _measure(outcome, plan, can, Path(args.logs or logs), rounds=args.rounds)
        outcome.finished = True
    except KeyboardInterrupt:
        print("interrupted: the page is of what was done", file=sys.stderr)
        status = 130
    outcome.minutes = (time.monotonic() - begun) / 60
    text = page(outcome)
    if args.out is None:
        print(text)
    else:
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(args.out, text)
            outcome.save(args.out.with_suffix(".json"))
        except OSError as error:
            print(f"{text}\nerror: {args.out} cannot be written: {error.strerror}", file=sys.stderr)
            return 1
        print(f"written: {args.out} and {args.out.with_suffix('.json')}", file=sys.stderr)
    return status or (OCTAVO in outcome.problems)


def _measure(outcome: Outcome, plan: list[tuple[Task, list[str]]], can: dict[str, Contender], logs: Path, *, rounds: int) -> None:
    rows = outcome.settings["rows"]
    logs.mkdir(parents=True, exist_ok=True)
    again = [START.peer] if START.row in rows else []
    forecast = Forecast(plan, can, rounds=rounds, again=again)
    print(f"About {about(forecast.left)} on two cores with bf16. Nothing else should run meanwhile.", file=sys.stderr)
    for name, reason in outcome.problems.items():
        print(f"{name} takes no part: {reason}", file=sys.stderr)
    with Turns(outcome, can, logs=logs) as turns:
        turns.expect(forecast)
        turns.start(again=again)
        for task, engines in plan:
            turns.run(task, engines, rounds=rounds, ours=OCTAVO)
            if task.name == "mixed" and MEMORY.row in rows:
                turns.memory([MEMORY.ours, MEMORY.peer])
        if START.row in rows:
            _start(outcome, can[OCTAVO], rounds=rounds)


def _start(outcome: Outcome, octavo: Contender, *, rounds: int) -> None:
    """Octavo's command, again and again; one start before them, which reads files into the cache, is not counted."""
    words = ["--model", str(octavo.model)]
    for name, value in octavo.options.items():
        words += ["--set", f"engine.{name}={value}"]
    try:
        environ = environment(octavo.environ)
        starts = [start_once(words, timeout_s=300, environ=environ).first_token for _ in range(rounds + 1)]
        outcome.starts[OCTAVO] = starts[1:]
    except StartupError as error:
        outcome.starts.pop(OCTAVO, None)
        outcome.problems.setdefault(OCTAVO, str(error))


def _identity(files: Files) -> dict[str, object]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 0,
        "memory": psutil.virtual_memory().total,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": files.origin,
        "weight_bytes": files.weight_bytes,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.peers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment that vLLM is installed in")
    parser.add_argument("--llama-cpp", type=Path, metavar="VENV", help="virtual environment that llama-cpp-python is installed in")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of the table: {', '.join(ROWS)}; default: all"
    )
    parser.add_argument("--rounds", type=_positive, default=5, help="that count (default: 5)")
    parser.add_argument("--threads", type=_positive, default=2, help="of each engine (default: 2)")
    parser.add_argument("--model", type=Path, help="GGUF file, or a folder of bf16 safetensors (default: SmolLM2-135M from its wheel)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument("--scale", type=_share, default=1.0, help="share of all counts and lengths, to try out a run (default: 1)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.md", help="where the page goes, and beside it the figures as JSON; default: printed"
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the engines print; default: it is thrown away")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
