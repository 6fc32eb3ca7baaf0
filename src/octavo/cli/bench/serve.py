"""`octavo bench serve`: requests at a rate or so many at once, and the table that people know from `vllm bench serve`.

With `--base-url` (or `--host`, `--port`) it measures a server; else an engine in this process, without HTTP, on the engine's own clock.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.bench.metrics import by_class, by_prompt_length, measure
from octavo.bench.serving_table import group_table, serving_table
from octavo.cli.bench.measuring import in_process, over_http
from octavo.cli.bench.result_flags import add_metric_arguments, add_noise_argument, percentiles_from, sections_from
from octavo.cli.bench.resuming import add_resume_argument, kept, resumed
from octavo.cli.bench.saving import add_result_arguments, check_result, save_result
from octavo.cli.bench.workload_flags import (
    add_arrival_arguments,
    add_workload_arguments,
    arrivals_from,
    check_workload,
    loop_lines,
)
from octavo.cli.settings import add_config_arguments, say
from octavo.core.errors import RequestError, ResultError

if TYPE_CHECKING:
    from octavo.bench.runs import Run
    from octavo.bench.self_checks import Checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    server = parser.add_argument_group("server", "To measure one that runs already, ours or any other OpenAI-compatible one.")
    server.add_argument("--base-url", metavar="URL", help="its address, like http://localhost:8000")
    server.add_argument("--host", metavar="HOST", help="the same in two parts (default with --port: 127.0.0.1)")
    server.add_argument("--port", type=int, metavar="INT", help="(default with --host: 8000)")
    server.add_argument("--endpoint", metavar="NAME", help="chat, completions (the default), or the path of one of them")
    server.add_argument(
        "--header", metavar="NAME=VALUE", action="append", default=[], help="one more header of each request; may be given again"
    )
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token (default: OPENAI_API_KEY of the environment)")
    server.add_argument("--tokenizer", metavar="SOURCE", help="a model whose tokenizer makes text for a server that takes no token ids")
    add_arrival_arguments(parser)
    parser.add_argument("--timeout-s", type=float, metavar="S", help="a request that takes longer has failed (default: over HTTP 600)")
    add_workload_arguments(parser)
    add_metric_arguments(parser)
    add_result_arguments(parser)
    add_resume_argument(parser)
    add_noise_argument(parser)
    parser.add_argument("--by-prompt-length", action="store_true", help="also print figures by length of the prompt")
    parser.add_argument("--no-probe", action="store_true", help="start at once, without a forecast and without a warm-up")
    parser.add_argument("--disable-tqdm", action="store_true", help="draw no progress bar")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Save, then print the table. Status 1: nothing was answered, a self-check failed, or the run did, 130: Ctrl-C.

    After Ctrl-C or a failure the table is of what was done.
    """
    before: Run | None = None
    if args.resume is not None:
        args, before = resumed(args, add_arguments)
    sections, percentiles = sections_from(args), percentiles_from(args)
    arrivals_from(args)
    if before is None:
        check_workload(args)
        check_result(args)
    if args.timeout_s is not None and not args.timeout_s > 0:
        raise RequestError(f"--timeout-s must be above 0, not {args.timeout_s:g}", field="timeout_s")
    url = _url(args)
    saved: list[Path] = []
    not_saved: list[ResultError] = []

    def keep(run: Run) -> None:
        """As soon as it is measured: whatever happens to the engine, the checks or the terminal afterwards."""
        run.arguments = kept(args, add_arguments)
        try:
            if (folder := save_result(args, run, sections=sections, percentiles=percentiles)) is not None:
                saved.append(folder)
        except ResultError as error:  # the table is left at least
            not_saved.append(error)

    if before is not None and before.complete:
        say(f"{args.resume} came to its end: nothing is left to do")
        run = before
    else:
        run = in_process(args, before, keep) if url is None else over_http(args, url, before, keep)
    checks = _print(args, run, sections=sections, percentiles=percentiles)
    if not_saved:
        raise not_saved[0]
    if not run.complete:
        not_kept = "it is not kept: give --save-result, and --resume can go on"
        say(f"{run.stopped_by}; {f'go on with: octavo bench serve --resume {saved[0]}' if saved else not_kept}")
        return 1 if run.failed else 130
    failed = any(one.fails(allow_noise=args.allow_noise) for one in checks)
    return 0 if any(record.succeeded for record in run.records) and not failed else 1


def _print(args: argparse.Namespace, run: Run, *, sections: list[str], percentiles: list[float]) -> list[Checked]:
    """The tables, then what became of the self-checks, which are returned."""
    from octavo.bench.check_lines import check_lines  # numpy: not before something was measured
    from octavo.bench.self_checks import run_checks
    from octavo.bench.stability import in_words, stability

    records, settings = run.records, loop_lines(args)
    if run.parts:
        settings.append(("Measured in parts", str(len(run.parts))))
    found = in_words(stability(run))
    print(serving_table(measure(records), settings=settings, sections=sections, percentiles=percentiles, stability=found))
    if len(classes := by_class(records)) > 1:
        print(f"\n{group_table('class', classes)}")
    if args.by_prompt_length:
        print(f"\n{group_table('prompt', by_prompt_length(records))}")
    for error in list(dict.fromkeys(record.error for record in records if record.error))[:3]:
        say(f"failed: {error}")
    checks = run_checks(run)
    lines = check_lines({"": checks})
    for problem in lines.failed:
        say(f"self-check failed: {problem}")
    for reason in lines.not_applicable:
        say(f"self-checks that do not apply: {reason}")
    say(f"self-checks that passed: {lines.passed or 'none'}")
    return checks


def _url(args: argparse.Namespace) -> str | None:
    """The server's address; None: none is named."""
    if args.base_url is not None:
        if args.host is not None or args.port is not None:
            raise RequestError("--base-url says the address; leave --host and --port out", field="base_url")
        return str(args.base_url).rstrip("/").removesuffix("/v1")
    if args.host is not None or args.port is not None:
        return f"http://{args.host or '127.0.0.1'}:{args.port or 8000}"
    for flag in ("endpoint", "api_key", "tokenizer", "header"):
        if getattr(args, flag):
            raise RequestError(f"--{flag.replace('_', '-')} is of a server: give its --base-url too", field=flag)
    return None
