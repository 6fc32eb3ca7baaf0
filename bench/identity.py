"""What a result was measured with: versions, model, settings, device. Two results are compared only where these say that they may be.

Must not know: what was measured; version control.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime

from octavo.bench.work import Work
from octavo.core.assembly import BuiltEngine
from octavo.core.description import Description, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity(Description):
    """Of one run: its engine, its work, and when. Hashes are sha256 in hex."""

    date: str  # UTC, ISO 8601: the one wall-clock time of a result
    workload: str
    workload_seed: int
    workload_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """Of a server that was measured over HTTP: what it says of itself. `unknown` has a reason for each field that is empty."""

    date: str  # UTC, ISO 8601
    url: str
    endpoint: str
    model: str  # as requests named it
    software: str = ""  # "octavo", or what its header `server` or its models' owner says
    version: str = ""
    root: str = ""  # what the model's name stands for
    max_model_len: int = 0
    workload_hash: str = ""
    unknown: dict[str, str] = field(default_factory=dict)


def identify(built: BuiltEngine, work: Work) -> Identity:
    """The identity of a run of this work on this engine, now."""
    return identity_of(describe(built), work)


def identity_of(engine: Description, work: Work) -> Identity:
    """The same, of an engine that was described, here or by a server."""
    described = {one.name: getattr(engine, one.name) for one in fields(Description)}
    return Identity(**described, date=now(), workload=work.name, workload_seed=work.seed, workload_hash=work.digest)


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def differences(before: object, after: object, names: Sequence[str]) -> list[str]:
    """Of two identities, in words; of the fields with these names."""
    return [
        f"{name}: {getattr(before, name)!r} then, {getattr(after, name)!r} now"
        for name in names
        if getattr(before, name) != getattr(after, name)
    ]
