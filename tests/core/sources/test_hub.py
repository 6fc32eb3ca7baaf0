"""The hub is asked once, bounded in time; what cannot be had from it is explained."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.core.errors import ModelSourceError
from octavo.core.sources import hub_download, hub_probe, resolve
from octavo.core.sources.hub_probe import is_hub_id

HUB_ID = "someone/tiny-llama"
COMMIT = "5c0ffee5c0ffee5c0ffee5c0ffee5c0ffee5c0ff"


def test_a_hub_model_is_fetched_and_then_comes_from_the_cache(hub, tiny_model: Path, octavo_home: Path, monkeypatch) -> None:
    """Every byte arrives, the log names commit and dtype, and the second time no request is made."""
    hub.serve(HUB_ID, tiny_model)
    lines: list[str] = []
    found = resolve(HUB_ID, report=lines.append)
    assert found.path == octavo_home / "hub" / "someone--tiny-llama" / COMMIT
    for file in tiny_model.iterdir():
        assert (found.path / file.name).read_bytes() == file.read_bytes()
    assert found.origin == f"hub ({HUB_ID}, revision {COMMIT[:12]}, weights fp32)"
    assert found.revision == COMMIT
    assert found.generation_config["eos_token_id"] == 2
    assert lines[-1] == f"model {HUB_ID}: {found.origin}"

    hub.requests.clear()
    again = resolve(HUB_ID)
    assert hub.requests == []
    assert again.origin == f"cache, taken from {found.origin}"
    assert again.path == found.path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve(HUB_ID, revision=COMMIT).path == found.path


def failure(hub_id: str = HUB_ID, **options: object) -> str:
    with pytest.raises(ModelSourceError) as caught:
        resolve(hub_id, **options)  # type: ignore[arg-type]
    return str(caught.value)


def downloads(hub) -> list[str]:
    return [request for request in hub.requests if "/resolve/" in request and "config.json" not in request]


def test_only_files_that_a_model_needs_are_fetched(hub, tiny_model: Path) -> None:
    """No pickle, no Python, no second copy of the weights, nothing from subfolders."""
    hub.serve(HUB_ID, tiny_model)
    unwanted = ("pytorch_model.bin", "modeling_x.py", "consolidated.00.safetensors", "onnx/model.json", "README.md")
    hub.repositories[HUB_ID].update(dict.fromkeys(unwanted, b"no"))
    found = resolve(HUB_ID)
    assert {path.name for path in found.path.iterdir()} == {path.name for path in tiny_model.iterdir()} | {"octavo.json"}
    assert not [request for request in hub.requests for name in unwanted if request.endswith(name)]


@pytest.mark.parametrize(
    ("part", "status", "code", "text"),
    [
        (
            "api/models",
            401,
            "GatedRepo",
            "is gated: accept its terms at {address}/" + HUB_ID + ", then log in with `hf auth login` or set HF_TOKEN.",
        ),
        ("resolve/", 401, "GatedRepo", "is gated: accept its terms at"),
        ("resolve/", 403, "GatedRepo", "is gated: accept its terms at"),
        ("resolve/", 403, "", "is gated: accept its terms at"),
        ("api/models", 401, "", "does not exist at {address}, or is private; if it is yours, log in"),
        ("api/models", 404, "RepoNotFound", "does not exist at {address}, or is private"),
        ("api/models", 500, "", f"the hub at {{address}} answered {HUB_ID} with HTTP 500."),
        ("model-00001", 503, "", f"the hub at {{address}} answered {HUB_ID} with HTTP 503."),
    ],
)
def test_a_refusal_is_explained_at_once(hub, tiny_model: Path, part: str, status: int, code: str, text: str, octavo_home: Path) -> None:
    """Gated, private, missing and failing hubs have their own words, one request each, and lead to the default model."""
    hub.serve(HUB_ID, tiny_model)
    hub.faults[part] = (status, code)
    message = failure()
    assert text.format(address=hub.address) in message
    assert 'The default model needs no account: source = "smollm2-135m" under [model], or LLM(model="smollm2-135m").' in message
    assert len(hub.requests) <= 3
    assert not octavo_home.exists()


def test_a_missing_revision_is_named(hub, tiny_model: Path) -> None:
    """The repository is there, its branch is not."""
    hub.serve(HUB_ID, tiny_model)
    assert f"hub model {HUB_ID} has no revision 'v9'." in failure(revision="v9")


def test_remote_code_is_refused_before_anything_is_downloaded(hub, tiny_model: Path) -> None:
    """`auto_map` in the hub's config.json stops before the weights; asked for, the Python files come along."""
    hub.serve(HUB_ID, tiny_model)
    files = hub.repositories[HUB_ID]
    files["config.json"] = files["config.json"].replace(b"{", b'{"auto_map": {"AutoModel": "modeling_x.X"},', 1)
    files["modeling_x.py"] = b"raise SystemExit"
    assert f"config.json of hub model {HUB_ID} asks to run the model's own Python code" in failure()
    assert downloads(hub) == []
    assert (resolve(HUB_ID, trust_remote_code=True).path / "modeling_x.py").is_file()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            ["config.json", "pytorch_model.bin"],
            "has no safetensors weights (config.json, pytorch_model.bin); pickled weights can run any code",
        ),
        (
            ["a.Q4_0.gguf", "a.Q8_0.gguf"],
            f"has only GGUF files (a.Q4_0.gguf, a.Q8_0.gguf). Fetch the one you want, then give its path: hf download {HUB_ID}",
        ),
        (["model.safetensors"], "has no config.json"),
        ([], "has no safetensors weights (no files)"),
    ],
)
def test_repositories_without_usable_weights_are_refused(hub, names: list[str], text: str) -> None:
    """What is there instead is listed."""
    hub.repositories[HUB_ID] = dict.fromkeys(names, b"x")
    assert text in failure()
    assert downloads(hub) == []


def test_a_damaged_download_is_not_used(hub, tiny_model: Path, octavo_home: Path) -> None:
    """Weights whose header does not fit their size never get their final name; the next try takes the mended file."""
    hub.serve(HUB_ID, tiny_model)
    files = hub.repositories[HUB_ID]
    shard = next(name for name in files if name.endswith("1-of-00002.safetensors") or name.startswith("model-00001"))
    whole, files[shard] = files[shard], files[shard][:-8]
    assert "is damaged: its header describes" in failure()
    assert not (octavo_home / "hub" / "someone--tiny-llama" / COMMIT).exists()
    files[shard] = whole
    assert (resolve(HUB_ID).path / shard).read_bytes() == whole


def test_a_damaged_cached_copy_is_fetched_anew(hub, tiny_model: Path) -> None:
    """The cache's own folder is checked like any other."""
    hub.serve(HUB_ID, tiny_model)
    found = resolve(HUB_ID)
    victim = sorted(found.path.glob("*.safetensors"))[0]
    whole = victim.read_bytes()
    victim.write_bytes(whole[:100])
    lines: list[str] = []
    assert resolve(HUB_ID, report=lines.append).path == found.path
    assert victim.read_bytes() == whole
    assert f"the cached copy in {found.path} is damaged, making it anew" in lines


def test_the_cache_of_other_hugging_face_programs_is_used(hub, tiny_model: Path) -> None:
    """A whole snapshot there is taken without any request; one without weights is not."""
    from huggingface_hub import constants, snapshot_download

    hub.serve(HUB_ID, tiny_model)
    snapshot_download(HUB_ID, endpoint=hub.address, cache_dir=constants.HF_HUB_CACHE)
    hub.requests.clear()
    found = resolve(HUB_ID)
    assert hub.requests == []
    assert Path(constants.HF_HUB_CACHE) in found.path.parents
    assert found.origin == f"cache, taken from hub ({HUB_ID}, revision {COMMIT[:12]}, weights fp32)"
    next(iter(found.path.glob("*.safetensors"))).unlink()
    assert Path(constants.HF_HUB_CACHE) not in resolve(HUB_ID).path.parents


def test_offline_mode_asks_nobody(hub, tiny_model: Path, monkeypatch) -> None:
    """HF_HUB_OFFLINE is honoured at once, as in every Hugging Face program."""
    hub.serve(HUB_ID, tiny_model)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert f"HF_HUB_OFFLINE is set, so the hub was not asked for {HUB_ID}." in failure()
    assert hub.requests == []


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_silent_hub_is_given_up_within_the_promised_time(silent_server: str, monkeypatch) -> None:
    """The one bound that is promised to users: 5 s, which `PROBE_S` keeps; more would hang this test."""
    assert hub_probe.PROBE_S <= 4.0
    monkeypatch.setattr(hub_probe, "PROBE_S", 0.5)
    monkeypatch.setenv("HF_ENDPOINT", silent_server)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert re.search(rf"the hub at {silent_server} (did not answer within|cannot be reached)", failure())


def test_a_closed_port_is_said(monkeypatch) -> None:
    """Refused connections are told from silence."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert f"the hub at {address} cannot be reached (ConnectError" in failure()


def test_a_stalled_name_resolution_is_given_up(monkeypatch) -> None:
    """getaddrinfo knows no timeout, so the probe does not wait for it."""
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: released.wait(20))
    monkeypatch.setattr(hub_probe, "PROBE_S", 0.3)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    try:
        assert "the hub at http://hub.invalid did not answer within" in failure()
    finally:
        released.set()


def test_a_download_that_stalls_is_ended(hub, tiny_model: Path, tmp_path: Path, monkeypatch) -> None:
    """The child process is killed when nothing grows, and the error says that the next try goes on."""
    hub.serve(HUB_ID, tiny_model)
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "huggingface_hub.py").write_text("import time\ndef snapshot_download(*args, **options):\n    time.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))  # a client that gets nothing; the real one may be done before it is looked at
    monkeypatch.setattr(hub_download, "STALL_S", 0.3)
    assert f"the hub at {hub.address} sent nothing for" in failure()


def test_a_full_disk_while_downloading_names_the_place(hub, tiny_model: Path, tmp_path: Path, octavo_home: Path, monkeypatch) -> None:
    """The child's operating-system error arrives as one, with the advice that a full cache gets."""
    hub.serve(HUB_ID, tiny_model)
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "huggingface_hub.py").write_text(
        "def snapshot_download(*args, **options):\n    raise OSError(28, 'No space left on device', options['local_dir'] + '/x')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    place = octavo_home / "hub" / "someone--tiny-llama" / f".{COMMIT}.partial" / "x"
    assert f"cannot write {place}: No space left on device. Make room" in failure()


@pytest.mark.parametrize(
    ("name", "valid"),
    [("a/b", True), ("Qwen/Qwen2.5-0.5B", True), ("a", False), ("a/b/c", False), ("../b", False), ("a/..", False), ("a b/c", False)],
)
def test_the_form_of_a_hub_id(name: str, valid: bool) -> None:
    """OWNER/NAME, as the hub itself allows it."""
    assert is_hub_id(name) is valid
