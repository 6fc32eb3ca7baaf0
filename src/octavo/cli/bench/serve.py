"""`octavo bench serve`: requests at a rate or so many at once, and the table that people know from `vllm bench serve`.

With `--base-url` (or `--host`, `--port`) it measures a server; else an engine in this process, without HTTP, on the engine's own clock.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.metrics import by_class, by_prompt_length, measure
from octavo.bench.probe import forecast, probe
from octavo.bench.records import RequestRecord
from octavo.bench.serving_table import group_table, serving_table
from octavo.bench.work import Work
from octavo.cli.bench.progress import bar
from octavo.cli.bench.result_flags import add_metric_arguments, percentiles_from, sections_from
from octavo.cli.bench.saving import add_result_arguments, check_result, save_result
from octavo.cli.bench.workload_flags import (
    add_arrival_arguments,
    add_workload_arguments,
    arrivals_from,
    check_workload,
    loop_lines,
    work_from,
)
from octavo.cli.settings import add_config_arguments, open_llm, say
from octavo.core.errors import RequestError

if TYPE_CHECKING:
    from octavo.bench.memory_table import MemoryMeter
    from octavo.bench.runs import Run
    from octavo.core.assembly import LoadedModel
    from octavo.core.text.tokenizer import Tokenizer

UNKNOWN_VOCABULARY = 32_000  # ids that nearly every model has
SERVER_SEATS = 64  # requests that an unknown server is thought to run at once, for the forecast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    server = parser.add_argument_group("server", "To measure one that runs already, ours or any other OpenAI-compatible one.")
    server.add_argument("--base-url", metavar="URL", help="its address, like http://localhost:8000")
    server.add_argument("--host", metavar="HOST", help="the same in two parts (default with --port: 127.0.0.1)")
    server.add_argument("--port", type=int, metavar="INT", help="(default with --host: 8000)")
    server.add_argument("--endpoint", metavar="PATH", help="of text completions (default: /v1/completions)")
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token (default: OPENAI_API_KEY of the environment)")
    server.add_argument("--tokenizer", metavar="SOURCE", help="a model whose tokenizer makes text for a server that takes no token ids")
    add_arrival_arguments(parser)
    parser.add_argument("--timeout-s", type=float, metavar="S", help="a request that takes longer has failed (default: over HTTP 600)")
    add_workload_arguments(parser)
    add_metric_arguments(parser)
    add_result_arguments(parser)
    parser.add_argument("--by-prompt-length", action="store_true", help="also print figures by length of the prompt")
    parser.add_argument("--no-probe", action="store_true", help="start at once, without a forecast and without a warm-up")
    parser.add_argument("--disable-tqdm", action="store_true", help="draw no progress bar")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table. Status 1: no request was answered, 130: Ctrl-C (the table is then of what was done)."""
    sections, percentiles, arrivals = sections_from(args), percentiles_from(args), arrivals_from(args)
    check_workload(args)
    if args.timeout_s is not None and not args.timeout_s > 0:
        raise RequestError(f"--timeout-s must be above 0, not {args.timeout_s:g}", field="timeout_s")
    url = _url(args)
    check_result(args)
    run = _in_process(args, arrivals) if url is None else _over_http(args, url, arrivals)
    records = run.records
    metrics = measure(records)
    print(serving_table(metrics, settings=loop_lines(args), sections=sections, percentiles=percentiles))
    if len(classes := by_class(records)) > 1:
        print(f"\n{group_table('class', classes)}")
    if args.by_prompt_length:
        print(f"\n{group_table('prompt', by_prompt_length(records))}")
    for error in list(dict.fromkeys(record.error for record in records if record.error))[:3]:
        say(f"failed: {error}")
    from octavo.bench.self_checks import failed_checks  # numpy: not before something was measured

    for problem in failed_checks(run):
        say(f"self-check failed: {problem.check}: {problem.text}")
    save_result(args, run, sections=sections, percentiles=percentiles)
    if not run.complete:
        say(run.stopped_by)
        return 130
    return 0 if metrics.succeeded else 1


def _url(args: argparse.Namespace) -> str | None:
    """The server's address; None: none is named."""
    if args.base_url is not None:
        if args.host is not None or args.port is not None:
            raise RequestError("--base-url says the address; leave --host and --port out", field="base_url")
        return str(args.base_url).rstrip("/").removesuffix("/v1")
    if args.host is not None or args.port is not None:
        return f"http://{args.host or '127.0.0.1'}:{args.port or 8000}"
    for flag in ("endpoint", "api_key", "tokenizer"):
        if getattr(args, flag) is not None:
            raise RequestError(f"--{flag.replace('_', '-')} is of a server: give its --base-url too", field=flag)
    return None


def _in_process(args: argparse.Namespace, arrivals: Any) -> Run:
    meters: list[MemoryMeter] = []

    def loaded(model: LoadedModel) -> None:
        from octavo.bench.memory_table import MemoryMeter

        meters.append(MemoryMeter(model.model))

    with open_llm(args, on_load=loaded) as llm:
        from octavo.bench.drive import drive
        from octavo.bench.identity import identify
        from octavo.bench.memory_table import full_step
        from octavo.bench.step_log import StepLog

        engine, tokenizer = llm.engine, llm.built.loaded.tokenizer
        work = work_from(
            args,
            vocab_size=engine.vocab_size,
            encode=None if tokenizer is None else tokenizer.encode,
            max_model_len=engine.max_model_len,
            arrivals=arrivals,
        )

        def send(work: Work, **how: Any) -> list[RequestRecord]:
            return drive(engine, work, **how)

        if not args.no_probe:
            seats = min(engine.scheduler.options.max_num_seqs, args.max_concurrency or math.inf)
            _forecast(args, send, work, seats=int(seats))
            engine.kv.reset()
        meters[0].begin(num_tokens=full_step(llm.built.config))
        log = StepLog(engine.clock.now())
        with log.watching(engine):
            run = _measure(args, partial(send, zero=log.zero), work, timeout_s=args.timeout_s)
        run.steps, run.identity = log.lines, identify(llm.built, work)
        run.memory = meters[0].table(llm.built.pool)
        run.settings["model"] = llm.built.config.source
        return run


def _over_http(args: argparse.Namespace, url: str, arrivals: Any) -> Run:
    import asyncio

    from octavo.bench.load.drive import drive_http
    from octavo.bench.load.target import Target, find_out

    for name in ("preset", "config"):
        if getattr(args, name) is not None:
            raise RequestError(f"--{name} is of an engine in this process; {url} has its own settings", field=name)
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    target = Target(url=url, model=args.model or "", endpoint=args.endpoint or "/v1/completions", headers=headers)
    tokenizer, vocab_size = _tokenizer(args)
    work = work_from(
        args, vocab_size=vocab_size, encode=None if tokenizer is None else tokenizer.encode, max_model_len=None, arrivals=arrivals
    )
    decode = None if tokenizer is None else tokenizer.decode
    target = asyncio.run(find_out(target, work.items[0].prompt[:4], decode=decode))
    say(f"{target.url}: model {target.model}{f'; {target.differences}' if target.differences else ''}")

    def send(work: Work, **how: Any) -> list[RequestRecord]:
        return drive_http(target, work, decode=decode, **how)

    if not args.no_probe:
        _forecast(args, send, work, seats=args.max_concurrency or SERVER_SEATS)
    run = _measure(args, send, work, timeout_s=args.timeout_s or 600.0)
    run.settings |= {"base_url": url, "model": target.model, "differences": target.differences}
    return run


def _tokenizer(args: argparse.Namespace) -> tuple[Tokenizer | None, int]:
    """Of `--tokenizer`, or of `--model` where that is a folder here; and the number of ids to draw from."""
    source = args.tokenizer or (args.model if args.model is not None and Path(args.model).is_dir() else None)
    if source is None:
        say(f"without a --tokenizer: prompts are token ids below {UNKNOWN_VOCABULARY}")
        return None, UNKNOWN_VOCABULARY
    from octavo.core.sources import resolve
    from octavo.core.text.tokenizer import Tokenizer

    found = resolve(source)
    return Tokenizer.from_folder(found.path), int(found.config["vocab_size"])


def _forecast(args: argparse.Namespace, send: Callable[..., list[RequestRecord]], work: Work, *, seats: int) -> None:
    pace = probe(lambda short: send(short, concurrency=max(1, min(seats, len(short.items)))), work)
    say(forecast(pace, work, seats=seats, open_loop=args.max_concurrency is None))


def _measure(args: argparse.Namespace, send: Callable[..., list[RequestRecord]], work: Work, *, timeout_s: float | None) -> Run:
    from octavo.bench.interrupts import RunInterrupted
    from octavo.bench.runs import Run

    settings = {name: getattr(args, name) for name in ("request_rate", "burstiness", "max_concurrency")} | {"timeout_s": timeout_s}
    if settings["request_rate"] == math.inf:
        settings["request_rate"] = "inf"  # JSON has no number for it
    with bar(len(work.items), shown=not args.disable_tqdm) as progress:
        try:
            records = send(work, concurrency=args.max_concurrency, timeout_s=timeout_s, progress=progress)
            return Run(work=work, records=records, settings=settings)
        except RunInterrupted as stopped:
            return Run(work=work, records=stopped.records, settings=settings, complete=False, stopped_by=str(stopped))
