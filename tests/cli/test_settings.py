"""`--config`, `--preset` and `--set`, as every command that starts an engine has them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from octavo.cli.settings import add_config_arguments, config_from
from octavo.core.options import SchedulerOptions
from octavo.core.registry import Registry
from octavo.core.settings.config import EngineConfig
from octavo.core.testing.fake_plugins import fake_allocator, fake_scheduler


def config_of(*words: str, registry: Registry) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return config_from(parser.parse_args(words), registry)


def test_command_line_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--set` may be repeated and wins over the environment, which wins over the file."""
    registry = Registry()
    registry.add(fake_scheduler("chunked", chunking=True))
    registry.add(fake_allocator("prefix"))
    (tmp_path / "o.toml").write_text('[engine]\nseed = 1\nmax_model_len = 1\ndtype = "float32"\n')
    monkeypatch.setenv("OCTAVO_SET_ENGINE__SEED", "2")
    monkeypatch.setenv("OCTAVO_SET_ENGINE__MAX_MODEL_LEN", "2")
    words = ["--config", str(tmp_path / "o.toml"), "--set", "engine.seed=3", "--set", "scheduler.max_num_seqs=8"]
    config = config_of(*words, registry=registry)
    assert (config.engine.seed, config.engine.max_model_len, config.engine.dtype) == (3, 2, "float32")
    assert config.scheduler.options.model_dump()["max_num_seqs"] == 8


def test_a_preset_lies_under_every_other_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--preset` wins over the file's and the environment's preset; what they say besides still counts."""
    registry = Registry()
    for plugin in (fake_scheduler("chunked", chunking=True), fake_scheduler("continuous"), fake_allocator("prefix"), fake_allocator()):
        registry.add(plugin)
    (tmp_path / "o.toml").write_text('preset = "orca"\n[scheduler]\nmax_num_seqs = 4\n')
    monkeypatch.setenv("OCTAVO_SET_PRESET", "vllm")
    config = config_of("--config", str(tmp_path / "o.toml"), "--preset", "chat", "--allocator", "paged", registry=registry)
    assert (config.scheduler.name, config.allocator.name) == ("chunked", "paged")
    assert config.scheduler.options == SchedulerOptions(max_num_batched_tokens=2048, max_num_seqs=4)
