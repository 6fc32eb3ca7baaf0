"""`--config` and `--set`, as every command that starts an engine has them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from octavo.cli.settings import add_config_arguments, config_from
from octavo.core.registry import Registry
from octavo.core.testing.fake_plugins import fake_allocator, fake_scheduler


def test_command_line_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--set` may be repeated and wins over the environment, which wins over the file."""
    registry = Registry()
    registry.add(fake_scheduler())
    registry.add(fake_allocator("prefix"))
    (tmp_path / "o.toml").write_text('[engine]\nseed = 1\nmax_model_len = 1\ndtype = "float32"\n')
    monkeypatch.setenv("OCTAVO_SET_ENGINE__SEED", "2")
    monkeypatch.setenv("OCTAVO_SET_ENGINE__MAX_MODEL_LEN", "2")
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    words = ["--config", str(tmp_path / "o.toml"), "--set", "engine.seed=3", "--set", "scheduler.max_num_seqs=8"]
    config = config_from(parser.parse_args(words), registry)
    assert (config.engine.seed, config.engine.max_model_len, config.engine.dtype) == (3, 2, "float32")
    assert config.scheduler.options.model_dump()["max_num_seqs"] == 8
