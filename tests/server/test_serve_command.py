"""`octavo serve`: the flags people know become the engine they mean; what is served is what was asked for."""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import cli
from octavo.core.registry import Registry
from octavo.core.settings.config import load_config
from octavo.server import lifecycle, logs
from octavo.server.served import Served
from octavo.server.settings import ServerSettings
from tests.models import tiny

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CPU = ["--device", "cpu", "--dtype", "float32", "--port", "0"]
Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Run the command with a tiny model in a folder of a large one's name, up to where it would serve; returns what it would."""
    shutil.copytree(tiny("llama_gqa", max_position_embeddings=8192), tmp_path / LLAMA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "set_up", lambda settings: None)
    seen: list[Served] = []

    async def run(self: lifecycle.Lifecycle, listener: Any) -> int:
        seen.append(self._here)
        await self._here.llm.close()
        return 0

    monkeypatch.setattr(lifecycle.Lifecycle, "run", run)

    def make(*arguments: str) -> Served:
        assert cli.main(["serve", *arguments, *CPU]) == 0
        return seen[-1]

    yield make


def test_the_articles_command_line(serve: Serve) -> None:
    """Word for word but the program's name: each flag arrives."""
    line = "--gpu-memory-utilization 0.92 --max-model-len 8192 --max-num-batched-tokens 16384 --max-num-seqs 256"
    here = serve("--model", LLAMA, *line.split())
    built = here.llm.built
    options = built.config.scheduler_options
    assert (options.max_num_seqs, options.max_num_batched_tokens, built.config.max_model_len) == (256, 16384, 8192)
    assert built.config.engine.gpu_memory_utilization == 0.92
    assert here.model_names == (LLAMA,)


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m octavo.server` takes and does what `octavo serve` does."""
    monkeypatch.setattr(sys, "argv", ["octavo.server", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("octavo.server", run_name="__main__")
    of_module = capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert ended.value.code == 0 and "--max-num-seqs" in of_module and of_module == capsys.readouterr().out


def test_flags_that_people_know(serve: Serve) -> None:
    """Keys, names, block size, switches, swap space; the model may stand alone."""
    flags = "--api-key one --api-key two --served-model-name a --served-model-name b --block-size 8 --max-model-len 64 --num-kv-slots 128"
    here = serve(LLAMA, *flags.split(), "--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--swap-space", "0.001")
    assert (here.settings.api_key, here.model_names) == (("one", "two"), ("a", "b"))
    built = here.llm.built
    names = built.config.stack.names
    assert (names["scheduler"], names["allocator"], built.pool.block_size) == ("continuous", "paged", 8)
    assert built.pool.num_host_slots == int(0.001 * 2**30) // built.pool.slot_bytes // 8 * 8 > 0


def test_a_config_file_has_a_table_for_the_server(serve: Serve, tmp_path: Path) -> None:
    """Flags override it."""
    file = tmp_path / "octavo.toml"
    file.write_text(f'[model]\nsource = "{LLAMA}"\n[engine]\nmax_model_len = 64\n[server]\ntimeout_s = 5.0\ndrain_timeout_s = 7.0\n')
    settings = serve("--config", str(file), "--drain-timeout-s", "9").settings
    assert (settings.timeout_s, settings.drain_timeout_s) == (5.0, 9.0)


@pytest.mark.parametrize(("written", "keys"), [('["one", "two"]', ("one", "two")), ('"one"', ("one",)), ("[]", ())])
def test_keys_from_a_file_and_the_environment(written: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    """Lists, as TOML has them; one alone needs no brackets. A key belongs on no command line, which everybody can read."""
    file = tmp_path / "octavo.toml"
    file.write_text(f"[server]\napi_key = {written}\n")
    registry = Registry.discover()
    read: Any = load_config(registry, file=file, environ={}, server=ServerSettings)
    assert read.server.api_key == keys
    read = load_config(registry, environ={"OCTAVO_SET_SERVER__API_KEY": written}, server=ServerSettings)
    assert read.server.api_key == keys


def test_a_setting_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name, before anything is loaded."""
    file = tmp_path / "octavo.toml"
    file.write_text("[server]\ntimeout = 5.0\n")
    assert cli.main(["serve", "--config", str(file)]) == 2
    assert "server.timeout: Extra inputs are not permitted (did you mean timeout_s?)" in capsys.readouterr().err
