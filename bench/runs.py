"""`Run`: all that is known of one run, as a folder of JSON that anybody can read.

    run.json         what it was measured with, how it was loaded, whether it came to its end, and in how many parts
    work.jsonl       what was asked for, an item a line
    requests.jsonl   what each request saw
    steps.jsonl      what each step of the engine did; empty where the engine is out of sight, behind HTTP

`MIGRATIONS` bring what older versions wrote up to date, one version at a time. Must not know: who made it, what is made of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from octavo.bench.accounting import KVAccount, account
from octavo.bench.identity import Identity, ServerIdentity
from octavo.bench.memory_table import MemoryTable
from octavo.bench.records import RequestRecord
from octavo.bench.schema import migrated
from octavo.bench.step_log import StepLine
from octavo.bench.whole_files import recover, whole_folder
from octavo.bench.work import Item, Work
from octavo.core.errors import ResultError

SCHEMA_VERSION = 3
HEADER, WORK, REQUESTS, STEPS = "run.json", "work.jsonl", "requests.jsonl", "steps.jsonl"


@dataclass(slots=True)
class Stored:
    """A run as it is written: plain JSON."""

    header: dict[str, Any]
    work: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    steps: list[dict[str, Any]]


def _in_one_piece(stored: Stored) -> Stored:
    """Version 1 knew no run in several parts, nothing of servers, and not with which arguments a run was begun."""
    added: dict[str, Any] = {"parts": [], "server": None, "counted": {}, "arguments": {}}
    return Stored(added | stored.header, stored.work, stored.requests, stored.steps)


def _never_failed(stored: Stored) -> Stored:
    """Version 2 kept no run that its own side ended, and not when the engine was given a request (`added`): that stays unknown."""
    return Stored({"failed": False} | stored.header, stored.work, stored.requests, stored.steps)


MIGRATIONS: dict[int, Callable[[Stored], Stored]] = {1: _in_one_piece, 2: _never_failed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Of a run that was stopped and gone on with. The run's clock stands still between two parts."""

    start: float  # seconds on the run's clock
    first_step: int  # its place among the run's steps
    date: str = ""  # UTC, ISO 8601
    cut_short: tuple[RequestRecord, ...] = ()  # requests that were under way when it was stopped; the next part asked them again


@dataclass(kw_only=True)
class Run:
    """One run. Times in it are seconds after its start."""

    work: Work
    records: list[RequestRecord]
    steps: list[StepLine] = field(default_factory=list)
    identity: Identity | None = None
    memory: MemoryTable | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # how it was sent: rate, concurrency, time-outs, to be printed
    complete: bool = True
    stopped_by: str = ""  # why it is not complete
    failed: bool = False  # it was stopped by a fault of its own side, and not by Ctrl-C
    server: ServerIdentity | None = None  # of a run over HTTP
    counted: dict[str, int | None] = field(default_factory=dict)  # what a server counted of itself meanwhile; None: it does not say
    parts: list[Part] = field(default_factory=list)  # of a run that was stopped and gone on with; empty: it is of one piece
    arguments: dict[str, Any] = field(default_factory=dict)  # that it was begun with, to go on with the same; no secrets

    @property
    def duration(self) -> float:
        """Seconds from its start to the end of the last request."""
        return max((record.ended for record in self.records), default=0.0)

    @cached_property
    def account(self) -> KVAccount:
        """Of its KV pool. Raises ValueError without steps."""
        return account(self.steps)

    @property
    def accounted(self) -> KVAccount | None:
        """The same, None where there is none: no step was logged, or the log contradicts itself, which a self-check says."""
        try:
            return self.account
        except ValueError:
            return None

    def save(self, folder: str | Path, *, beside: Mapping[str, str] | None = None) -> None:
        """Write the folder, whole or not at all, in place of an older run there; `beside` are texts of further files, by name.

        Raises ResultError if something else is there, OSError where it cannot be written.
        """
        folder = Path(folder)
        recover(folder)
        if folder.exists() and not (folder / HEADER).is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise ResultError(f"{folder} holds something that is no run: give another folder, or empty it")
        with whole_folder(folder) as part:
            _write(part / WORK, _ITEM, self.work.items)
            _write(part / REQUESTS, _RECORD, self.records)
            _write(part / STEPS, _STEP, self.steps)
            (part / HEADER).write_text(json.dumps(self._header(), indent=1) + "\n", encoding="utf-8")
            for name, text in (beside or {}).items():
                (part / name).write_text(text, encoding="utf-8")

    def _header(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "complete": self.complete,
            "stopped_by": self.stopped_by,
            "failed": self.failed,
            "num_items": len(self.work.items),
            "num_requests": len(self.records),
            "num_steps": len(self.steps),
            "settings": self.settings,
            "work": {"name": self.work.name, "seed": self.work.seed, "made_from": self.work.made_from},
            "identity": _IDENTITY.dump_python(self.identity, mode="json"),
            "memory": _MEMORY.dump_python(self.memory, mode="json"),
            "server": _SERVER.dump_python(self.server, mode="json"),
            "counted": self.counted,
            "parts": _PARTS.dump_python(self.parts, mode="json"),
            "arguments": self.arguments,
        }

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a folder that this or an older version wrote. Raises ResultError that says which file is damaged, missing or too new."""
        folder = Path(folder)
        recover(folder)
        stored = migrated(_read(folder), MIGRATIONS, where=folder, to=SCHEMA_VERSION, header=lambda stored: stored.header)
        header = stored.header
        try:
            work = header["work"]
            return cls(
                work=Work(
                    name=work["name"], seed=work["seed"], made_from=work["made_from"], items=_each(_ITEM, stored.work, folder / WORK)
                ),
                records=_each(_RECORD, stored.requests, folder / REQUESTS),
                steps=_each(_STEP, stored.steps, folder / STEPS),
                identity=_IDENTITY.validate_python(header["identity"]),
                memory=_MEMORY.validate_python(header["memory"]),
                settings=header["settings"],
                complete=header["complete"],
                stopped_by=header["stopped_by"],
                failed=header["failed"],
                server=_SERVER.validate_python(header["server"]),
                counted=header["counted"],
                parts=_PARTS.validate_python(header["parts"]),
                arguments=header["arguments"],
            )
        except ValidationError as error:
            raise ResultError(f"{folder / HEADER} is damaged: {_first(error)}") from error
        except (KeyError, TypeError) as error:
            raise ResultError(f"{folder / HEADER} is damaged: {type(error).__name__} {error}") from error


def is_complete(folder: str | Path) -> bool:
    """A run that came to its end is saved there, of whatever version: nothing is left for `--resume`.

    False where there is none, or it cannot be read.
    """
    try:
        recover(Path(folder))
        header = json.loads((Path(folder) / HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError, ResultError):
        return False
    return isinstance(header, dict) and header.get("complete") is True and isinstance(header.get("schema_version"), int)


def _read(folder: Path) -> Stored:
    """The files, checked for being whole."""
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ResultError(f"{folder} is no saved run: it has no {HEADER}") from error
    except (OSError, ValueError) as error:
        raise ResultError(f"{folder / HEADER} cannot be read: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("schema_version"), int):
        raise ResultError(f"{folder / HEADER} has no schema_version: it is not of Octavo, or damaged")
    return Stored(
        header,
        _lines(folder / WORK, header.get("num_items")),
        _lines(folder / REQUESTS, header.get("num_requests")),
        _lines(folder / STEPS, header.get("num_steps")),
    )


def _lines(path: Path, expected: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    found.append(json.loads(line))
                except ValueError as error:
                    raise ResultError(f"{path}, line {number}, is damaged: {error}") from error
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error
    if len(found) != expected:
        raise ResultError(f"{path} has {len(found)} lines, {HEADER} says {expected}: a part of it is lost")
    return found


def _write(path: Path, kind: TypeAdapter[Any], entries: Iterable[Any]) -> None:
    with path.open("wb") as file:
        file.writelines(kind.dump_json(entry, exclude_defaults=True) + b"\n" for entry in entries)


def _each(kind: TypeAdapter[Any], entries: Iterable[Any], path: Path) -> list[Any]:
    found = []
    for number, entry in enumerate(entries, 1):
        try:
            found.append(kind.validate_python(entry))
        except ValidationError as error:
            raise ResultError(f"{path}, line {number}, is damaged: {_first(error)}") from error
    return found


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


_ITEM: TypeAdapter[Any] = TypeAdapter(Item)
_RECORD: TypeAdapter[Any] = TypeAdapter(RequestRecord)
_STEP: TypeAdapter[Any] = TypeAdapter(StepLine)
_IDENTITY = TypeAdapter(Identity | None)
_MEMORY = TypeAdapter(MemoryTable | None)
_SERVER = TypeAdapter(ServerIdentity | None)
_PARTS = TypeAdapter(list[Part])


def sum_known(one: int | None, other: int | None) -> int | None:
    """Of two counts of one thing; None where one of them is not known."""
    return None if one is None or other is None else one + other
