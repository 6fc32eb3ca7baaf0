"""The Hugging Face hub: is it there, what does the repository hold, and fetch that into the cache.

A hub that cannot be reached may cost a user `PROBE_S` seconds and no more. Name resolution has no timeout and the hub's
client retries for minutes, so the probe runs on a thread that is left behind at the deadline, and the download in a child
process (`hub_fetch.py`) that is ended when no byte arrives for `STALL_S` seconds. Until the probe has seen the
repository's listing, its config and the answer for a weight file, nothing is downloaded.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE` and proxies work as they do for every Hugging Face program.
Protocol: https://huggingface.co/docs/hub/api.

Must not know: catalogue, wheels, GGUF.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from octavo.core.errors import ModelSourceError
from octavo.core.sources.cache import Report, home, locked, obtain, read_provenance, write_provenance, writing
from octavo.core.sources.checks import check_tokenizer, check_weights
from octavo.core.sources.convert import make_tokenizer
from octavo.core.sources.model_source import ModelSource, check_config, read_folder

PROBE_S = 4.0
STALL_S = 30.0

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_FETCHED = (".safetensors", ".json", ".txt", ".model", ".jinja")  # weights, configs, vocabularies, chat templates
_OTHER_WEIGHTS = ("consolidated", "adapter_model")  # second copies in another layout


@dataclass(frozen=True)
class Listing:
    """What the probe learnt of one repository."""

    commit: str
    files: tuple[str, ...]  # the ones worth fetching
    num_bytes: int


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form OWNER/NAME that the hub gives to repositories."""
    return _HUB_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def endpoint() -> str:
    """The hub's address."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


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
        _download(hub_id, listing=listing, staging=staging)
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


def probe(hub_id: str, *, revision: str, trust_remote_code: bool) -> Listing:
    """List the repository, read its config and open its weights, within `PROBE_S` seconds altogether."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}:
            raise ModelSourceError(f"{variable} is set, so the hub was not asked for {hub_id}.")
    answer: list[Listing | Exception] = []

    def ask() -> None:
        try:
            answer.append(_ask(hub_id, revision=revision, trust_remote_code=trust_remote_code))
        except Exception as error:  # whatever the client's HTTP library raises
            answer.append(error)

    thread = threading.Thread(target=ask, name="octavo-hub-probe", daemon=True)
    thread.start()
    thread.join(PROBE_S)
    if not answer:
        raise ModelSourceError(f"the hub at {endpoint()} did not answer within {PROBE_S:.0f} s.")
    if isinstance(answer[0], ModelSourceError):
        raise answer[0]
    if isinstance(answer[0], Exception):
        raise ModelSourceError(_explain(hub_id, revision=revision, error=answer[0])) from answer[0]
    return answer[0]


def _ask(hub_id: str, *, revision: str, trust_remote_code: bool) -> Listing:
    from huggingface_hub import HfApi, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    info = HfApi(endpoint=endpoint()).model_info(hub_id, revision=revision, timeout=PROBE_S, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    files = _choose(hub_id, names=sorted(sizes), trust_remote_code=trust_remote_code)
    weights = next(file for file in files if file.endswith(".safetensors"))
    commit = info.sha or revision

    def url(file: str) -> str:
        return hf_hub_url(hub_id, file, revision=commit, endpoint=endpoint())

    headers = build_hf_headers()
    if "config.json" in files:  # looked at before gigabytes are fetched
        config = get_session().get(url("config.json"), headers=headers, timeout=PROBE_S, follow_redirects=True)
        hf_raise_for_status(config)
        check_config(config.json(), where=f"config.json of hub model {hub_id}", trust_remote_code=trust_remote_code)
    else:
        raise ModelSourceError(f"hub model {hub_id} has no config.json, so it is no model that can be loaded by itself.")
    first_byte = {**headers, "Range": "bytes=0-0"}
    with get_session().stream("GET", url(weights), headers=first_byte, timeout=PROBE_S, follow_redirects=True) as response:
        if response.status_code >= 400:
            response.read()  # the client's message quotes it
        hf_raise_for_status(response)
    return Listing(commit=commit, files=files, num_bytes=sum(sizes[file] for file in files))


def _choose(hub_id: str, *, names: list[str], trust_remote_code: bool) -> tuple[str, ...]:
    """The files to fetch: top level only, no pickle, Python only where remote code is allowed."""
    kinds = (*_FETCHED, ".py") if trust_remote_code else _FETCHED
    files = [name for name in names if "/" not in name and name.endswith(kinds) and not name.startswith(_OTHER_WEIGHTS)]
    if any(name.endswith(".safetensors") for name in files):
        return tuple(files)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        raise ModelSourceError(
            f"hub model {hub_id} has only GGUF files ({', '.join(ggufs[:5])}). "
            f"Fetch the one you want, then give its path: hf download {hub_id} {ggufs[0]} --local-dir ."
        )
    raise ModelSourceError(
        f"hub model {hub_id} has no safetensors weights ({', '.join(names[:8]) or 'no files'}); "
        "pickled weights can run any code when opened and are refused. Take a model with *.safetensors."
    )


def _explain(hub_id: str, *, revision: str, error: Exception) -> str:
    """What an exception of the hub's client means for the user."""
    kind = type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    login = "log in with `hf auth login` or set HF_TOKEN"
    if kind == "GatedRepoError" or status == 403:
        return f"hub model {hub_id} is gated: accept its terms at {endpoint()}/{hub_id}, then {login}."
    if kind == "RevisionNotFoundError":
        return f"hub model {hub_id} has no revision {revision!r}."
    if status in (401, 404):
        return f"hub model {hub_id} does not exist at {endpoint()}, or is private; if it is yours, {login}."
    if status is not None:
        return f"the hub at {endpoint()} answered {hub_id} with HTTP {status}."
    return f"the hub at {endpoint()} cannot be reached ({kind}: {str(error) or 'no detail'})."


def _download(hub_id: str, *, listing: Listing, staging: Path) -> None:
    """Run the hub's client in a child process, and end it when nothing arrives any more."""
    task = {
        "repo_id": hub_id,
        "revision": listing.commit,
        "local_dir": str(staging),
        "allow_patterns": list(listing.files),
        "endpoint": endpoint(),
    }
    script = Path(__file__).with_name("hub_fetch.py")
    # The probe tried plain HTTP; the chunk protocol's own hosts may be blocked where that works.
    environment = {"HF_HUB_DISABLE_XET": "1", **os.environ}
    terminal = sys.stderr is not None and sys.stderr.isatty()
    child = subprocess.Popen(
        [sys.executable, "-P", str(script), json.dumps(task)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if terminal else subprocess.DEVNULL,  # the client's progress bars
        env=environment,
        text=True,
    )
    try:
        _watch(child, received=lambda: _size(staging))
        output, _ = child.communicate()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode:
        raise ModelSourceError(f"fetching {hub_id} from the hub failed: {output.strip() or f'exit status {child.returncode}'}")


def _watch(child: subprocess.Popen[Any], *, received: Callable[[], int]) -> None:
    """Return when `child` ends; raise when `received()` has not grown for `STALL_S` seconds."""
    size, since = received(), time.monotonic()
    while True:
        try:
            child.wait(timeout=0.2)
            return
        except subprocess.TimeoutExpired:
            now = received()
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_S:
                raise ModelSourceError(
                    f"the hub at {endpoint()} sent nothing for {STALL_S:.0f} s. Try again: what arrived is kept and the download goes on."
                ) from None


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # renamed meanwhile
            continue
    return total


def _place(hub_id: str) -> Path:
    return home() / "hub" / hub_id.replace("/", "--")


def _origin(hub_id: str, commit: str) -> str:
    return f"hub ({hub_id}, revision {commit}, weights {{dtype}})"


def _shared_snapshot(hub_id: str, revision: str) -> Path | None:
    """The snapshot folder in the cache that all Hugging Face programs share, if it holds this revision."""
    from huggingface_hub import constants, snapshot_download

    if not Path(constants.HF_HUB_CACHE).is_dir():
        return None
    try:
        return Path(snapshot_download(hub_id, revision=revision, cache_dir=constants.HF_HUB_CACHE, local_files_only=True))
    except (OSError, ValueError):  # not there or not whole; the client's errors derive from these
        return None
