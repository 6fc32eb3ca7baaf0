"""One run of `octavo bench serve`, on an engine in this process or on a server, from its beginning or from where it was stopped.

Must not know: what is printed and kept of it.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.probe import forecast, probe
from octavo.bench.records import RequestRecord
from octavo.bench.work import Work
from octavo.cli.bench.progress import bar
from octavo.cli.bench.resuming import check_same
from octavo.cli.bench.workload_flags import arrivals_from, work_from
from octavo.cli.settings import open_llm, say
from octavo.core.errors import RequestError

if TYPE_CHECKING:
    from octavo.bench.memory_table import MemoryMeter
    from octavo.bench.runs import Run
    from octavo.core.assembly import LoadedModel
    from octavo.core.text.tokenizer import Tokenizer

UNKNOWN_VOCABULARY = 32_000  # ids that nearly every model has
SERVER_SEATS = 64  # requests that an unknown server is thought to run at once, for the forecast
Send = Callable[..., list[RequestRecord]]
Keep = Callable[["Run"], object]
"""Told of a run as soon as it is measured."""


def in_process(args: argparse.Namespace, before: Run | None, keep: Keep) -> Run:
    """Of the engine of these arguments; after `before`, which it goes on with, if that is given."""
    meters: list[MemoryMeter] = []

    def loaded(model: LoadedModel) -> None:
        from octavo.bench.memory_table import MemoryMeter

        meters.append(MemoryMeter(model.model))

    with open_llm(args, on_load=loaded) as llm:
        from octavo.bench.drive import drive, seats
        from octavo.bench.identity import identify
        from octavo.bench.runs import Run
        from octavo.bench.step_log import StepLog

        engine, tokenizer = llm.engine, llm.built.loaded.tokenizer
        encode = None if tokenizer is None else tokenizer.encode
        work = before.work if before else _work(args, engine.vocab_size, encode, engine.max_model_len)
        begun = Run(work=work, records=[], identity=identify(llm.built, work), settings={"model": llm.built.config.source})

        def send(work: Work, **how: Any) -> list[RequestRecord]:
            return drive(engine, work, **how)

        def measure(work: Work) -> Run:
            if not args.no_probe:
                _forecast(args, send, work, seats=min(seats(engine, work), args.max_concurrency or len(work.items)))
                engine.kv.reset()
            meters[0].begin(llm.built)
            log = StepLog(engine.clock.now())
            with log.watching(engine):
                run = _measure(args, partial(send, zero=log.zero), work, begun, timeout_s=args.timeout_s)
            run.steps = log.lines
            if not run.failed:  # or a broken device would be asked
                run.memory = meters[0].table(llm.built.pool)
            return run

        return _whole(args, before, begun, measure, keep)


def over_http(args: argparse.Namespace, url: str, before: Run | None, keep: Keep) -> Run:
    """The same of a server."""
    import asyncio
    from dataclasses import replace

    from octavo.bench.identity import identity_of
    from octavo.bench.load.drive import drive_http
    from octavo.bench.load.server_look import count, counted, identify_server
    from octavo.bench.load.target import CHAT, COMPLETIONS, Target, find_out
    from octavo.bench.runs import Run

    for name in ("preset", "config"):
        if getattr(args, name) is not None:
            raise RequestError(f"--{name} is of an engine in this process; {url} has its own settings", field=name)
    endpoint = {"chat": CHAT, "completions": COMPLETIONS}.get(args.endpoint or "completions", args.endpoint)
    target = Target(url=url, model=args.model or "", endpoint=endpoint, headers=_headers(args))
    tokenizer, vocab_size = _tokenizer(args)
    work = before.work if before else _work(args, vocab_size, None if tokenizer is None else tokenizer.encode, None)
    decode = None if tokenizer is None else tokenizer.decode
    target = asyncio.run(find_out(target, work.items[0].prompt[:4], decode=decode))
    server, engine = asyncio.run(identify_server(target))
    if engine is not None:
        target = replace(target, classes=frozenset(engine.options["scheduler"].get("classes") or ()))
    say(f"{target.url}: model {target.model}{f'; {target.differences}' if target.differences else ''}")
    begun = Run(
        work=work,
        records=[],
        identity=None if engine is None else identity_of(engine, work),
        server=replace(server, workload_hash=work.digest),
        settings={"base_url": url, "model": target.model, "differences": target.differences},
    )

    def send(work: Work, **how: Any) -> list[RequestRecord]:
        return drive_http(target, work, decode=decode, **how)

    def measure(work: Work) -> Run:
        if not args.no_probe:
            _forecast(args, send, work, seats=args.max_concurrency or SERVER_SEATS)
        earlier = asyncio.run(count(target))
        run = _measure(args, send, work, begun, timeout_s=args.timeout_s or 600.0)
        later: dict[str, float] = {}
        with suppress(KeyboardInterrupt, Exception):  # who doesn't wait for its counters, or cannot read them, loses these and not the run
            later = asyncio.run(count(target))
        run.counted = counted(earlier, later)
        return run

    return _whole(args, before, begun, measure, keep)


def _whole(args: argparse.Namespace, before: Run | None, begun: Run, measure: Callable[[Work], Run], keep: Keep) -> Run:
    """All of the work, or what is left of it and what was there, as one run."""
    if before is None:
        run = measure(begun.work)
    else:
        from dataclasses import replace

        from octavo.bench.run_parts import joined, rest_of

        check_same(args.resume, before, begun)
        rest = rest_of(before)
        say(f"going on with {args.resume}: {len(rest.indices)} of {len(before.work.items)} requests are left")
        run = joined(before, measure(rest.work), rest) if rest.indices else replace(before, complete=True, stopped_by="", failed=False)
    keep(run)
    return run


def _work(args: argparse.Namespace, vocab_size: int, encode: Any, max_model_len: int | None) -> Work:
    return work_from(args, vocab_size=vocab_size, encode=encode, max_model_len=max_model_len, arrivals=arrivals_from(args))


def _headers(args: argparse.Namespace) -> dict[str, str]:
    """Of `--header` and the key. Raises RequestError for what is no header."""
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for word in args.header:
        name, equals, value = word.partition("=")
        if not equals or not name.strip() or any(mark in word for mark in "\r\n"):
            raise RequestError(f"--header: {word!r} is not NAME=VALUE", field="header")
        headers[name.strip()] = value
    return headers


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


def _forecast(args: argparse.Namespace, send: Send, work: Work, *, seats: int) -> None:
    pace = probe(lambda short: send(short, concurrency=len(short.items)), work, seats=seats)
    say(forecast(pace, work, seats=seats, open_loop=args.max_concurrency is None))


def _measure(args: argparse.Namespace, send: Send, work: Work, begun: Run, *, timeout_s: float | None) -> Run:
    """`begun` with what became of this work."""
    from dataclasses import replace

    from octavo.bench.interrupts import RunFailed, RunInterrupted

    settings = {name: getattr(args, name) for name in ("request_rate", "burstiness", "max_concurrency")} | {"timeout_s": timeout_s}
    if settings["request_rate"] == math.inf:
        settings["request_rate"] = "inf"  # JSON has no number for it
    run = replace(begun, work=work, settings=settings | begun.settings)
    with bar(len(work.items), shown=not args.disable_tqdm) as progress:
        try:
            run.records = send(work, concurrency=args.max_concurrency, timeout_s=timeout_s, progress=progress)
        except RunInterrupted as stopped:
            run.records = stopped.records
            run.complete = len(run.records) == len(work.items) and not any(record.cut_short for record in run.records)
            run.stopped_by = "" if run.complete else str(stopped)
        except RunFailed as failure:
            run.records, run.complete, run.failed, run.stopped_by = failure.records, False, True, f"the run failed: {failure}"
    return run
