"""Presets: what each stands for, who wins over it, and how one part of it is changed."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from octavo.core.descriptors import SchedulerPlugin
from octavo.core.errors import InvalidOptionsError
from octavo.core.options import SchedulerOptions
from octavo.core.registry import Registry
from octavo.core.settings.config import EngineConfig, load_config
from octavo.core.settings.flat import from_flat
from octavo.core.settings.layers import from_command_line
from octavo.core.settings.presets import PRESETS
from octavo.core.settings.schema import json_schema
from octavo.core.testing.fake_plugins import fake_allocator, fake_kernel, fake_model, fake_ops, fake_scheduler
from octavo.plugins.allocators.contiguous import CONTIGUOUS, ContiguousOptions
from octavo.plugins.allocators.paged import PAGED, PagedOptions
from octavo.plugins.schedulers.static import STATIC, StaticOptions

STACKS = {
    "fastertransformer": ("static", "contiguous"),
    "orca": ("continuous", "contiguous"),
    "vllm": ("chunked", "prefix"),
    "chat": ("chunked", "prefix"),
    "offline": ("continuous", "prefix"),
}


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    schedulers = (fake_scheduler("continuous"), fake_scheduler("chunked", chunking=True), STATIC)
    for plugin in (*schedulers, CONTIGUOUS, PAGED, fake_allocator("prefix", options=PagedOptions), fake_kernel(), fake_ops(), fake_model()):
        registry.add(plugin)
    return registry


def load(registry: Registry, **sources: Any) -> EngineConfig:
    return load_config(registry, **{"environ": {}, **sources})


@pytest.mark.parametrize("name", PRESETS)
def test_what_each_stands_for(registry: Registry, name: str) -> None:
    """The stacks that the presets are named after (requirement P1), and the two ready configs (requirement S3)."""
    config = load(registry, overrides={"preset": name})
    assert (config.scheduler.name, config.allocator.name) == STACKS[name]
    if config.allocator.name == "contiguous":
        assert config.allocator.options == ContiguousOptions(reservation="max")
    budget = config.scheduler.options.model_dump()["max_num_batched_tokens"]
    assert budget == {"chat": 2048, "offline": 16384}.get(name)


BUILT_IN = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})


@pytest.mark.parametrize("name", PRESETS)
def test_the_built_in_plugins_take_what_a_preset_sets(name: str) -> None:
    """Nothing in a preset is misspelt."""
    config = load(BUILT_IN, overrides={"preset": name})
    assert (config.scheduler.name, config.allocator.name) == STACKS[name]


def test_chat_cuts_prompts_and_offline_does_not(registry: Registry) -> None:
    """A small budget with chunking against a large one without: that is the comparison."""
    chat, offline = (load(registry, overrides={"preset": name}).scheduler.plugin for name in ("chat", "offline"))
    assert isinstance(chat, SchedulerPlugin) and isinstance(offline, SchedulerPlugin)
    assert (chat.chunking, offline.chunking) == (True, False)


def test_defaults_preset_file_environment_command_line(registry: Registry, tmp_path: Path) -> None:
    """Each wins over those before it, setting by setting: max_num_seqs of all, the budget of the preset, the rest of the defaults."""
    file = tmp_path / "o.toml"
    file.write_text('preset = "chat"\n[scheduler]\nmax_num_seqs = 1\nageing = 1.0\norder = "priority"\n')
    environ = {"OCTAVO_SET_SCHEDULER__MAX_NUM_SEQS": "2", "OCTAVO_SET_SCHEDULER__AGEING": "2.0"}
    config = load(registry, file=file, environ=environ, overrides=from_command_line(["scheduler.max_num_seqs=3"]))
    expected = SchedulerOptions(max_num_batched_tokens=2048, max_num_seqs=3, ageing=2.0, order="priority")
    assert (config.scheduler.name, config.scheduler.options) == ("chunked", expected)
    assert load(registry, file=file, environ={"OCTAVO_SET_SCHEDULER__MAX_NUM_BATCHED_TOKENS": "4096"}).scheduler.options == (
        SchedulerOptions(max_num_batched_tokens=4096, max_num_seqs=1, ageing=1.0, order="priority")
    )


def test_the_topmost_name_counts(registry: Registry, tmp_path: Path) -> None:
    """File < environment < command line, LLM(preset=...) or Python; what a lower preset set is not left behind."""
    file = tmp_path / "o.toml"
    file.write_text('preset = "chat"\n')
    assert load(registry, file=file).scheduler.name == "chunked"
    environ = {"OCTAVO_SET_PRESET": "orca"}
    config = load(registry, file=file, environ=environ)
    assert (config.scheduler.name, config.scheduler.options) == ("continuous", SchedulerOptions())
    assert load(registry, file=file, environ=environ, overrides=from_flat(preset="fastertransformer")).scheduler.name == "static"


def test_one_part_of_a_preset_can_be_changed(registry: Registry) -> None:
    """Another plugin takes the place of the preset's with its own defaults; everything else stays. The same plugin keeps them."""
    config = load(registry, overrides=from_flat(preset="chat", scheduler="static"))
    assert (config.scheduler.options, config.allocator.name) == (StaticOptions(), "prefix")
    config = load(registry, overrides=from_flat(preset="orca", allocator="paged", block_size=8))
    assert (config.scheduler.name, config.allocator.options) == ("continuous", PagedOptions(block_size=8))
    config = load(registry, overrides=from_flat(preset="chat", scheduler="chunked", max_num_seqs=8, block_size=4))
    assert config.scheduler.options == SchedulerOptions(max_num_batched_tokens=2048, max_num_seqs=8)
    assert config.allocator.options == PagedOptions(block_size=4)
    config = load(registry, overrides=from_flat(preset="chat", enable_chunked_prefill=False))
    assert (config.scheduler.name, config.scheduler.options) == ("continuous", SchedulerOptions())


@pytest.mark.parametrize(
    ("name", "shown"), [("chatt", "'chatt' (did you mean chat?)"), ("xyz", "'xyz'"), (3, "3"), (["chat"], "['chat'] (did you mean chat?)")]
)
def test_unknown_names(registry: Registry, name: Any, shown: str) -> None:
    """The nearest match and all names are said."""
    with pytest.raises(InvalidOptionsError) as error:
        load(registry, overrides={"preset": name})
    assert str(error.value) == f"no preset is called {shown}; presets are chat, fastertransformer, offline, orca, vllm"


def test_an_unknown_name_is_said_with_its_source_beside_other_mistakes(registry: Registry, tmp_path: Path) -> None:
    """It is one problem among all; a misspelt `preset` finds its match too."""
    file = tmp_path / "o.toml"
    file.write_text('preset = "vlm"\n[engine]\nseed = -1\n')
    with pytest.raises(InvalidOptionsError) as error:
        load(registry, file=file, overrides={"presett": "chat"})
    assert str(error.value).splitlines() == [
        "3 settings cannot be used:",
        f"  - no preset is called 'vlm' (did you mean vllm?); presets are chat, fastertransformer, offline, orca, vllm [{file}]",
        "  - presett: no such section (did you mean preset?); sections are model, scheduler, allocator, kernel, ops, engine, server",
        f"  - engine.seed: Input should be greater than or equal to 0 (got -1) [{file}]",
    ]


def test_what_a_preset_sets_wrongly_names_it() -> None:
    """An option that the installed plugin lacks is said to come from the preset."""
    registry = Registry()
    for plugin in (fake_scheduler("static"), fake_allocator("contiguous", layout="region")):
        registry.add(plugin)
    with pytest.raises(InvalidOptionsError) as error:
        load(registry, overrides={"preset": "fastertransformer"})
    assert str(error.value) == "allocator.contiguous.reservation: Extra inputs are not permitted [preset fastertransformer]"


def test_the_schema_knows_the_presets(registry: Registry) -> None:
    """An editor offers their names."""
    assert json_schema(registry)["properties"]["preset"]["enum"] == list(PRESETS)


def test_the_command_prints_what_can_be_pasted_into_a_config() -> None:
    """`octavo presets`: TOML that says what the preset says; `--json` for machines."""
    command = [sys.executable, "-m", "octavo", "presets"]
    text, data = (subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=True) for more in ([], ["--json"]))
    printed = dict(zip(PRESETS, text.stdout.split("\n\n"), strict=True))
    for preset in PRESETS.values():
        assert printed[preset.name].startswith(f"# {preset.name}: {preset.summary}\n")
        assert tomllib.loads(printed[preset.name]) == preset.settings
    assert [(row["name"], row["settings"]) for row in json.loads(data.stdout)] == [(p.name, p.settings) for p in PRESETS.values()]
