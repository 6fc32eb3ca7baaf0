"""Is the hub there, and what does a repository hold that is worth fetching?

A hub that cannot be reached may cost a user `PROBE_S` seconds and no more: name resolution has no timeout and the hub's
client retries for minutes, so the probe runs on a thread that is left behind at the deadline. It asks for the listing, the
config, and the answer for a weight file, which another host may give. Only when it has all three is anything downloaded.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE` and proxies work as they do for every Hugging Face program.
Protocol: https://huggingface.co/docs/hub/api.

Must not know: the cache, the catalogue, wheels.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass

from octavo.core.errors import ModelSourceError
from octavo.core.sources.model_source import check_config

PROBE_S = 4.0

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
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]  # public, not in __all__

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
