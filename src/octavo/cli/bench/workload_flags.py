"""Flags that say what is asked and when: `--dataset-name`, `--num-prompts`, and each workload's own options as `--WORKLOAD-OPTION`.

So `--random-input-len` and its like are those that people know from `vllm bench`. Must not know: engines.
"""

from __future__ import annotations

import argparse
import math
import types
from pathlib import Path
from typing import Any, get_args

from octavo.bench.arrivals import Arrivals
from octavo.bench.clipping import clip
from octavo.bench.drawing import Encode
from octavo.bench.work import Work
from octavo.bench.workloads import WORKLOADS, make_work
from octavo.cli.settings import say
from octavo.core.errors import RequestError

PATH = "path"  # an option that has a flag for all: --dataset-path


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset-name", default="random", metavar="NAME", help=f"{', '.join(WORKLOADS)} (default: random)")
    group.add_argument("--dataset-path", metavar="FILE", help="the file of the workloads sharegpt and trace")
    group.add_argument("--num-prompts", type=int, default=100, metavar="INT", help="requests in all (default: 100)")
    group.add_argument("--seed", type=int, default=0, metavar="INT", help="of lengths, tokens and arrivals (default: 0)")
    for workload in WORKLOADS.values():
        own = parser.add_argument_group(f"workload {workload.name}", f"{workload.summary[0].upper()}{workload.summary[1:]}.")
        for name, field in workload.options.model_fields.items():
            if name == PATH:
                continue
            flag, dest = f"--{workload.name}-{name.replace('_', '-')}", _dest(workload.name, name)
            text = f"{(field.description or '').replace('%', '%%')} (default: {'unset' if field.default is None else field.default})"
            kind = _kind(field.annotation)
            if kind is bool:
                own.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, help=text)
            else:
                own.add_argument(flag, dest=dest, type=kind, metavar=kind.__name__.upper(), help=text)


def add_arrival_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--request-rate`, `--burstiness` and `--max-concurrency`."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=float, metavar="FLOAT", help="open loop: requests a second; inf, the default, sends all at once"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="FLOAT",
        help="shape of the gamma distribution of the gaps: 1, the default, is Poisson, less is more bursty, inf is even",
    )
    group.add_argument("--max-concurrency", type=int, metavar="INT", help="closed loop: so many requests at once, each as one ends")


def arrivals_from(args: argparse.Namespace) -> Arrivals | None:
    """None: at the workload's own times, if it has some, or all at once. Raises RequestError for what contradicts itself."""
    if args.max_concurrency is not None:
        if args.request_rate is not None:
            raise RequestError(
                "--request-rate and --max-concurrency are two experiments, an open and a closed loop: give one of them "
                "(what the engine runs at once is limited by --set scheduler.max_num_seqs=...)",
                field="max_concurrency",
            )
        if args.max_concurrency < 1:
            raise RequestError(f"--max-concurrency must be at least 1, not {args.max_concurrency}", field="max_concurrency")
    if args.request_rate is None:
        if args.burstiness is not None:
            raise RequestError("--burstiness is of arrivals at a rate: give --request-rate too", field="burstiness")
        return None
    try:
        return Arrivals(rate=args.request_rate, burstiness=1.0 if args.burstiness is None else args.burstiness)
    except ValueError as error:
        raise RequestError(str(error), field="request_rate") from None


def check_workload(args: argparse.Namespace) -> None:
    """What can be wrong with the flags shows before a model is loaded. Raises RequestError."""
    options, workload = _options(args), WORKLOADS.get(args.dataset_name)
    readers = [one.name for one in WORKLOADS.values() if PATH in one.options.model_fields]
    if args.dataset_path is not None and args.dataset_name not in readers:
        raise RequestError(f"--dataset-path is of the workloads {' and '.join(readers)}, not of {args.dataset_name!r}", field="path")
    if args.dataset_path is not None and not Path(args.dataset_path).is_file():
        raise RequestError(f"--dataset-path {args.dataset_path}: there is no such file", field="path")
    if workload is None or args.dataset_path is None:  # what reads a file may need the tokenizer
        make_work(args.dataset_name, count=1, vocab_size=1024, options=options)
    if args.num_prompts < 1:
        raise RequestError(f"--num-prompts must be at least 1, not {args.num_prompts}", field="num_prompts")


def work_from(
    args: argparse.Namespace,
    *,
    vocab_size: int,
    encode: Encode | None,
    max_model_len: int | None,
    arrivals: Arrivals | None = None,
    turns: bool = True,
) -> Work:
    """The work of these arguments, cut to the context where that is known; what was cut is said.

    `turns`: requests may wait for the answers to others. Raises RequestError.
    """
    work = make_work(
        args.dataset_name,
        count=args.num_prompts,
        vocab_size=vocab_size,
        seed=args.seed,
        options=_options(args),
        arrivals=arrivals,
        encode=encode,
    )
    if not turns and any(item.after is not None for item in work.items):
        raise RequestError(
            f"the turns of the workload {work.name!r} wait for answers: measure it with `octavo bench serve`", field="workload"
        )
    if max_model_len is not None:
        work, cut = clip(work, max_model_len)
        if cut:
            say(cut)
    if len(work.items) < args.num_prompts:
        say(f"the workload {work.name!r} has {len(work.items)} requests, not {args.num_prompts}")
    return work


def loop_lines(args: argparse.Namespace) -> list[tuple[str, str]]:
    """How it was loaded, for the table."""
    if args.max_concurrency is not None:
        return [("Maximum request concurrency", str(args.max_concurrency))]
    if args.request_rate is not None and math.isfinite(args.request_rate):
        return [("Request rate configured (RPS)", f"{args.request_rate:.2f}")]
    return []


def _options(args: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for workload in WORKLOADS.values():
        for name in workload.options.model_fields:
            value = getattr(args, _dest(workload.name, name), None)
            if value is None:
                continue
            if workload.name != args.dataset_name:
                flag = f"--{workload.name}-{name.replace('_', '-')}"
                raise RequestError(f"{flag} is of the workload {workload.name!r}, this run's is {args.dataset_name!r}", field=flag)
            given[name] = value
    if args.dataset_path is not None:
        given[PATH] = args.dataset_path
    return given


def _dest(workload: str, option: str) -> str:
    return f"{workload} {option}"  # a space: no other flag's


def _kind(annotation: Any) -> type:
    """Of `int`, `float`, `bool` or one of these and None."""
    if isinstance(annotation, types.UnionType):
        annotation = next(one for one in get_args(annotation) if one is not type(None))
    if annotation not in (int, float, bool, str):
        raise TypeError(f"no flag can be made of {annotation}")
    return annotation  # type: ignore[no-any-return]
