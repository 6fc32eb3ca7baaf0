"""Settings of all sources: who wins, and what is said of each kind of mistake."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from octavo.core.errors import InvalidOptionsError, UnknownPluginError
from octavo.core.options import PluginOptions, SchedulerOptions
from octavo.core.registry import Registry
from octavo.core.settings.config import EngineConfig, load_config
from octavo.core.settings.flat import from_flat
from octavo.core.settings.layers import from_command_line, value_of
from octavo.core.settings.schema import json_schema
from octavo.core.testing.fake_plugins import fake_allocator, fake_kernel, fake_model, fake_ops, fake_scheduler


class PagedOptions(PluginOptions):
    block_size: int = Field(16, ge=1)


class StaticOptions(SchedulerOptions):
    window: float = 0.0


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    for plugin in (
        fake_scheduler("continuous"),
        fake_scheduler("chunked", chunking=True),
        fake_scheduler("static", options=StaticOptions),
        fake_allocator("paged", options=PagedOptions),
        fake_allocator("prefix"),
        fake_allocator("contiguous", layout="region"),
        fake_kernel(),
        fake_ops(),
        fake_model(),
    ):
        registry.add(plugin)
    return registry


def load(registry: Registry, **sources: Any) -> EngineConfig:
    return load_config(registry, **{"environ": {}, **sources})


def complaint(registry: Registry, **sources: Any) -> str:
    with pytest.raises(InvalidOptionsError) as error:
        load(registry, **sources)
    return str(error.value)


def test_defaults(registry: Registry) -> None:
    """With no settings: the default model on chunked + prefix, everything else left to `auto`."""
    config = load(registry)
    assert (config.source, config.scheduler.name, config.allocator.name) == ("smollm2-135m", "chunked", "prefix")
    assert config.model is config.kernel is config.ops is None
    assert config.scheduler.options == SchedulerOptions()
    assert config.engine.gpu_memory_utilization == 0.92


FILE = """
[model]
plugin = "llama"
source = "some/model"
[scheduler]
plugin = "chunked"
max_num_seqs = 1
max_num_batched_tokens = 1
ageing = 1.0
[allocator]
plugin = "paged"
block_size = 8
[kernel]
plugin = "naive"
[ops]
plugin = "torch"
[engine]
max_model_len = 8192
gpu_memory_utilization = 0.92
dtype = "auto"
kv_dtype = "auto"
seed = 0
"""


def test_precedence(registry: Registry, tmp_path: Path) -> None:
    """Defaults < file < environment < command line, setting by setting."""
    (tmp_path / "octavo.toml").write_text(FILE)
    environ = {"OCTAVO_SET_SCHEDULER__MAX_NUM_SEQS": "2", "OCTAVO_SET_SCHEDULER__MAX_NUM_BATCHED_TOKENS": "2", "HOME": "/"}
    overrides = from_command_line(["scheduler.max_num_seqs=3"])
    config = load(registry, file=tmp_path / "octavo.toml", environ=environ, overrides=overrides)
    assert config.scheduler.name == "chunked"
    assert config.scheduler.options == SchedulerOptions(max_num_seqs=3, max_num_batched_tokens=2, ageing=1.0)
    assert config.allocator.options == PagedOptions(block_size=8)
    assert config.source == "some/model"
    assert [part.name for part in (config.model, config.kernel, config.ops) if part] == ["llama", "naive", "torch"]


def test_the_process_environment_is_read_by_default(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that passes no environment gets os.environ."""
    monkeypatch.setenv("OCTAVO_SET_ENGINE__SEED", "7")
    assert load_config(registry).engine.seed == 7


def test_a_bare_name_stands_for_a_section(registry: Registry) -> None:
    """`scheduler = "static"` as an incompatible stack prints its fix, also beside other sources' settings; `model` names the source."""
    environ = {"OCTAVO_SET_SCHEDULER": "static", "OCTAVO_SET_SCHEDULER__WINDOW": "0.5", "OCTAVO_SET_MODEL": "folder"}
    config = load(registry, environ=environ, overrides={"scheduler": {"max_num_seqs": 4}})
    assert config.scheduler.name == "static"
    assert config.scheduler.options == StaticOptions(window=0.5, max_num_seqs=4)
    assert config.source == "folder"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("{max_running = 2}", {"max_running": 2}),
        ('"8"', "8"),
        ("4GiB", "4GiB"),
        ("some/model", "some/model"),
        ("2026-01-01", "2026-01-01"),
        ("1\nother = 2", "1\nother = 2"),
        ("", ""),
    ],
)
def test_texts_are_toml_values_or_themselves(text: str, value: Any) -> None:
    """What stands in the environment means what it would mean in the file."""
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


def test_tables_in_texts(registry: Registry) -> None:
    """Classes can be set on the command line too, whole or limit by limit."""
    overrides = from_command_line(["scheduler.classes.batch={max_running = 2}", "scheduler.classes.batch.max_queue=5"])
    limits = load(registry, overrides=overrides).scheduler.options.classes["batch"]
    assert (limits.max_running, limits.max_queue) == (2, 5)


def test_a_typo_names_plugin_and_option_and_the_nearest(registry: Registry) -> None:
    """The designed message, to the letter."""
    overrides = {"scheduler": {"plugin": "chunked", "max_num_batched_token": 4}}
    assert (
        complaint(registry, overrides=overrides)
        == "scheduler.chunked.max_num_batched_token: Extra inputs are not permitted (did you mean max_num_batched_tokens?)"
    )


def test_an_option_of_another_plugin_says_whose_it_is(registry: Registry) -> None:
    """A block size makes no sense to an allocator without blocks."""
    overrides = {"allocator": {"plugin": "contiguous", "block_size": 4}}
    expected = "allocator.contiguous.block_size: Extra inputs are not permitted (it is an option of allocator 'paged')"
    assert complaint(registry, overrides=overrides) == expected


def test_an_unknown_plugin_is_the_registrys_error(registry: Registry) -> None:
    """Nothing else is wrong, so the error has the class that says what is."""
    with pytest.raises(UnknownPluginError) as error:
        load(registry, overrides={"scheduler": "chunkd"})
    assert (
        str(error.value) == "no scheduler plugin 'chunkd' is installed (did you mean chunked?); installed are: chunked, continuous, static"
    )


def test_a_switch_whose_plugin_is_not_there_yet_says_so() -> None:
    """`enable_chunked_prefill=True` without the chunked scheduler names the plugin that is missing."""
    registry = Registry()
    registry.add(fake_scheduler("continuous"))
    registry.add(fake_allocator("prefix"))
    with pytest.raises(UnknownPluginError) as error:
        load(registry, overrides=from_flat(enable_chunked_prefill=True, max_num_batched_tokens=4096, gpu_memory_utilization=0.9))
    assert str(error.value) == "no scheduler plugin 'chunked' is installed; installed are: continuous"


def test_everything_wrong_is_said_at_once_with_its_source(registry: Registry, tmp_path: Path) -> None:
    """Nobody wants to mend a config error by error; what was not just typed says where it stands."""
    where = tmp_path / "o.toml"
    where.write_text('shceduler = "x"\n[scheduler]\nclasses = {b = {max_runing = 1}}\n[engine]\nseed = true\nkv_dtype = "fp8"\n')
    text = complaint(
        registry,
        file=where,
        environ={"OCTAVO_SET_SCHEDULER__MAX_NUM_SEQS": "many"},
        overrides={"kernel": "nave", "allocator": 3, "ops": {"threads": 2}, "engine": {"swap_space": -4, "gpu_memory_utilization": 1.5}},
    )
    assert text.splitlines() == [
        "10 settings cannot be used:",
        "  - shceduler: no such section (did you mean scheduler?); sections are model, scheduler, allocator, kernel, ops, engine, server"
        f" [{where}]",
        "  - allocator: must be a table of settings (got 3)",
        "  - scheduler.chunked.max_num_seqs: Input should be a valid integer (got 'many') [environment]",
        f"  - scheduler.chunked.classes.b.max_runing: Extra inputs are not permitted (did you mean max_running?) [{where}]",
        "  - no kernel plugin 'nave' is installed (did you mean naive?); installed are: naive",
        "  - ops.auto.threads: Extra inputs are not permitted (name the ops plugin to set its options)",
        "  - engine.gpu_memory_utilization: Input should be less than or equal to 1 (got 1.5)",
        "  - engine.swap_space: Input should be greater than or equal to 0 (got -4)",
        "  - engine.kv_dtype: a KV cache in fp8 is not available yet; use 'auto', 'float32', 'bfloat16' or 'float16'" + f" [{where}]",
        f"  - engine.seed: Input should be a valid integer (got True) [{where}]",
    ]


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (
            {"kv_cache_memory": "4 gigs"},
            "engine.kv_cache_memory: write bytes as a number, or a number with a unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB), like '4GiB'",
        ),
        ({"kv_cache_memory": 0}, "engine.kv_cache_memory: Input should be greater than or equal to 1 (got 0)"),
        (
            {"kv_cache_memory": "4GiB", "num_kv_slots": 64},
            "engine: kv_cache_memory and num_kv_slots both size the KV pool; set one of them",
        ),
        ({"gpu_memory_utilization": float("nan")}, "engine.gpu_memory_utilization: Input should be a finite number (got nan)"),
        ({"gpu_memory_utilization": True}, "engine.gpu_memory_utilization: Input should be a valid number (got True)"),
        ({"dtype": "bf16"}, "engine.dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16' (got 'bf16')"),
        ({"device": "CPU"}, r"engine.device: String should match pattern '^[a-z]+(:\d+)?$' (got 'CPU')"),
        ({"sede": 1}, "engine.sede: Extra inputs are not permitted (did you mean seed?)"),
    ],
)
def test_engine_settings_are_checked(registry: Registry, engine: dict[str, Any], text: str) -> None:
    """Range, type, unit and contradiction, each with its text."""
    assert complaint(registry, overrides={"engine": engine}) == text


@pytest.mark.parametrize(
    ("written", "size"), [(44_828_721_152, 44_828_721_152), ("4GiB", 4 << 30), ("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), ("7B", 7)]
)
def test_sizes(registry: Registry, written: int | str, size: int) -> None:
    """Bytes, or a number with a unit."""
    assert load(registry, overrides={"engine": {"kv_cache_memory": written}}).engine.kv_cache_memory == size


def test_swapping_needs_swap_space(registry: Registry) -> None:
    """`preemption = "swap"` without a place to swap to is refused."""
    expected = "scheduler.chunked.preemption: 'swap' keeps preempted requests in host memory, which needs engine.swap_space > 0"
    assert complaint(registry, overrides={"scheduler": {"preemption": "swap"}}) == expected


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"model": {"source": ""}}, "model.source: must name a model, a folder or a file (got '')"),
        ({"model": {"source": 3}}, "model.source: must name a model, a folder or a file (got 3)"),
        ({"kernel": {"plugin": 3}}, "kernel.plugin: must be a plugin's name (got 3)"),
    ],
)
def test_names_are_texts(registry: Registry, overrides: dict[str, Any], text: str) -> None:
    """A source and a plugin are named by a text."""
    assert complaint(registry, overrides=overrides) == text


def test_unreadable_files(registry: Registry, tmp_path: Path) -> None:
    """A file that isn't there and one that isn't TOML say so, with the place."""
    missing, broken = tmp_path / "missing.toml", tmp_path / "broken.toml"
    broken.write_text("[scheduler\n")
    assert complaint(registry, file=missing) == f"config file {missing} cannot be read: No such file or directory"
    assert complaint(registry, file=broken).startswith(f"config file {broken} is not valid TOML: ")
    assert "line 1" in complaint(registry, file=broken)


@pytest.mark.parametrize("text", ["scheduler.max_num_seqs", "=3", "scheduler..x=3"])
def test_malformed_set(text: str) -> None:
    """`--set` without a name or a value shows how it is written."""
    with pytest.raises(InvalidOptionsError) as error:
        from_command_line([text])
    assert str(error.value) == f"--set {text}: write --set SECTION.NAME=VALUE, like --set scheduler.max_num_seqs=8"


def test_high_utilization_is_warned_of(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    """Above 0.95 works, but not silently; 0.95 does."""
    with caplog.at_level(logging.WARNING, logger="octavo"):
        load(registry, overrides={"engine": {"gpu_memory_utilization": 0.95}})
        assert caplog.messages == []
        load(registry, overrides={"engine": {"gpu_memory_utilization": 0.97}})
    assert caplog.messages == ["gpu_memory_utilization = 0.97 leaves little of the device to everything else; 0.85 to 0.95 is usual"]


def test_schema_knows_every_installed_plugin(registry: Registry) -> None:
    """One variant a plugin, told apart by `plugin`, with exactly the options that loading accepts."""
    schema = json_schema(registry)
    _, table = schema["properties"]["scheduler"]["anyOf"]
    assert table["discriminator"]["mapping"].keys() == {"continuous", "chunked", "static"}
    static = schema["$defs"]["scheduler_static"]
    assert static["properties"].keys() == {"plugin", *StaticOptions.model_fields}
    assert static["additionalProperties"] is False
    assert static["required"] == ["plugin"]
    assert "required" not in schema["$defs"]["scheduler_chunked"]
    assert schema["$defs"]["model_llama"]["properties"].keys() == {"plugin", "source", "revision", "trust_remote_code"}
    assert schema["additionalProperties"] is False


def test_the_model_section_names_a_revision_and_may_trust_code(registry: Registry) -> None:
    """Both stand beside `source`; wrong types are refused by name."""
    config = load(registry, overrides=from_flat(model="a/b", revision="v1", trust_remote_code=True))
    assert (config.source, config.revision, config.trust_remote_code) == ("a/b", "v1", True)
    assert (load(registry).revision, load(registry).trust_remote_code) == (None, False)
    for setting, text in (
        ({"revision": 3}, "model.revision: must be a branch, tag or commit"),
        ({"trust_remote_code": "yes"}, "true or false"),
    ):
        with pytest.raises(InvalidOptionsError, match=text):
            load(registry, overrides={"model": setting})


@pytest.mark.parametrize(
    ("given", "place", "words"),
    [
        ({"method": "eagle"}, "method", "'ngram'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens", "greater than or equal to 1"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens", "valid integer"),
        ({"prompt_lookup_max": 1}, None, "prompt_lookup_min = 2 is more than prompt_lookup_max = 1"),
        ({"prompt_lookup_maxx": 3}, "prompt_lookup_maxx", "did you mean prompt_lookup_max?"),
        ("ngram", None, "dictionary"),
    ],
    ids=str,
)
def test_speculation_settings_that_cannot_be_used(registry: Registry, given: Any, place: str | None, words: str) -> None:
    """The place within the table, and what it takes."""
    said = complaint(registry, overrides=from_flat(speculative_config=given))
    assert said.startswith(f"engine.speculative_config{f'.{place}' if place else ''}: ") and words in said


def test_speculation_from_every_source(registry: Registry, tmp_path: Path) -> None:
    """Off by default; a file's table, the environment and `--set` set single entries of it."""
    assert load(registry).engine.speculative_config is None
    file = tmp_path / "octavo.toml"
    file.write_text("[engine.speculative_config]\nnum_speculative_tokens = 2\n")
    environ = {"OCTAVO_SET_ENGINE__SPECULATIVE_CONFIG__PROMPT_LOOKUP_MAX": "3"}
    overrides = from_command_line(["engine.speculative_config.prompt_lookup_min=1"])
    found = load(registry, file=file, environ=environ, overrides=overrides).engine.speculative_config
    assert found is not None
    assert found.model_dump() == {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
