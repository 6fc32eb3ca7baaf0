"""The Hugging Face hub's models: from the cache, else probed (`hub_probe`) and downloaded into it (`hub_download`).

Must not know: catalogue, wheels, GGUF.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.parse import quote

from octavo.core.errors import ModelSourceError
from octavo.core.sources.cache import Report, home, locked, obtain, read_provenance, write_provenance, writing
from octavo.core.sources.checks import check_tokenizer, check_weights
from octavo.core.sources.convert import make_tokenizer
from octavo.core.sources.hub_download import download
from octavo.core.sources.hub_probe import probe
from octavo.core.sources.model_source import ModelSource, read_folder


def find_cached(hub_id: str, *, name: str, revision: str | None, trust_remote_code: bool) -> ModelSource | None:
    """The whole model from Octavo's cache, else from the one of Hugging Face's own programs, without any network."""
    wanted = revision or "main"
    place = _place(hub_id)
    try:
        commit = (place / "refs" / quote(wanted, safe="")).read_text(encoding="utf-8").strip()
    except OSError:
        commit = wanted
    for folder, described in ((place / commit, None), (_shared_snapshot(hub_id, wanted), _origin(hub_id, "{commit}"))):
        if folder is None or not folder.is_dir():
            continue
        try:
            check_weights(folder)
            check_tokenizer(folder)
            if described is None:
                origin, commit = read_provenance(folder)
            else:
                commit = folder.name
                origin = described.replace("{commit}", commit[:12])
        except ModelSourceError:
            continue  # not whole: it will be fetched
        return read_folder(folder, name=name, origin=f"cache, taken from {origin}", revision=commit, trust_remote_code=trust_remote_code)
    return None


def fetch(hub_id: str, *, name: str, revision: str | None, trust_remote_code: bool, report: Report) -> ModelSource:
    """Probe the hub, then download into the cache. Raises `ModelSourceError` with the reason where that fails."""
    wanted = revision or "main"
    listing = probe(hub_id, revision=wanted, trust_remote_code=trust_remote_code)
    place = _place(hub_id)
    folder = place / listing.commit
    origin = _origin(hub_id, listing.commit[:12])

    def build(staging: Path) -> None:
        report(f"fetching {hub_id} from the hub, {listing.num_bytes / 1e6:.1f} MB")
        download(hub_id, listing=listing, staging=staging)
        shutil.rmtree(staging / ".cache", ignore_errors=True)  # the client's own notes
        if not (staging / "tokenizer.json").exists():
            make_tokenizer(staging, staging, trust_remote_code=trust_remote_code, report=report)
        write_provenance(staging, origin=origin.replace("{dtype}", check_weights(staging)), revision=listing.commit)

    def check(path: Path) -> ModelSource:
        read_provenance(path)
        return read_folder(path, name=name, origin=origin, revision=listing.commit, trust_remote_code=trust_remote_code)

    obtain(folder, build, check=check, report=report)
    with writing(place), locked(place / "refs", report):
        ref = place / "refs" / quote(wanted, safe="")
        ref.parent.mkdir(exist_ok=True)
        draft = ref.with_suffix(".partial")
        draft.write_text(listing.commit, encoding="utf-8")
        os.replace(draft, ref)
    return check(folder)


def _place(hub_id: str) -> Path:
    return home() / "hub" / hub_id.replace("/", "--")


def _origin(hub_id: str, commit: str) -> str:
    return f"hub ({hub_id}, revision {commit}, weights {{dtype}})"


def _shared_snapshot(hub_id: str, revision: str) -> Path | None:
    """The snapshot folder in the cache that all Hugging Face programs share, if it holds this revision."""
    from huggingface_hub import constants

    if not (Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}").is_dir():
        return None  # at once: the client behind `snapshot_download` takes a fifth of a second to import
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, revision=revision, cache_dir=constants.HF_HUB_CACHE, local_files_only=True))
    except (OSError, ValueError):  # not there or not whole; the client's errors derive from these
        return None
