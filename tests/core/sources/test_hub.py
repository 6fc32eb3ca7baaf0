"""The hub is asked once, bounded in time; what cannot be had from it is explained."""

from __future__ import annotations

from pathlib import Path

from octavo.core.sources import resolve

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
