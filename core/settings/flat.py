"""The flat names of `LLM(...)`, mapped into the sections of the config: `max_num_seqs=8` is `scheduler.max_num_seqs`.

Must not know: which plugins are installed, whether a value is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.core.errors import InvalidOptionsError
from octavo.core.settings.engine import EngineSettings
from octavo.core.settings.layers import Table, nested
from octavo.core.settings.presets import KEY as PRESET
from octavo.core.suggest import did_you_mean

PLUGINS = {"model_plugin": "model", "scheduler": "scheduler", "allocator": "allocator", "kernel": "kernel", "ops": "ops"}
SETTINGS = {
    "model": ("model", "source"),
    "revision": ("model", "revision"),
    "trust_remote_code": ("model", "trust_remote_code"),
    "block_size": ("allocator", "block_size"),
    "max_num_seqs": ("scheduler", "max_num_seqs"),
    "max_num_batched_tokens": ("scheduler", "max_num_batched_tokens"),
    **{name: ("engine", name) for name in EngineSettings.model_fields},
}
SWITCHES = {  # name: (section, plugin when True, plugin when False)
    "enable_chunked_prefill": ("scheduler", "chunked", "continuous"),
    "enable_prefix_caching": ("allocator", "prefix", "paged"),
}
NAMES = (*SETTINGS, *PLUGINS, *SWITCHES, PRESET)


def from_flat(**settings: Any) -> Table:
    """Turn flat names into the `overrides` of `load_config`; None means not given.

    `model_plugin`, `scheduler`, `allocator`, `kernel` and `ops` take a plugin's name or its table. A switch is short for a plugin
    choice: True for the plugin that has the feature, False, where no plugin is named, for the one that lacks it.
    Raises `InvalidOptionsError` with every unknown name, every setting given twice and every contradiction.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    problems = [
        f"{name}: no such setting{did_you_mean(name, NAMES)}; settings are {', '.join(NAMES)}" for name in given if name not in NAMES
    ]
    tables: dict[str, Table] = {section: {} for section in PLUGINS.values()}
    for name in (name for name in PLUGINS if name in given):
        match given[name]:
            case str(plugin):
                tables[PLUGINS[name]] = {"plugin": plugin}
            case Mapping() as table:
                tables[PLUGINS[name]] = dict(table)
            case other:
                problems.append(f"{name}: takes a plugin's name or its table (got {other!r})")
    problems += _twice(given, tables)
    for name in (name for name in SWITCHES if name in given):
        section, on, off = SWITCHES[name]
        problems += _contradictions(name, given[name], tables[section].get("plugin"))
        tables[section].setdefault("plugin", on if given[name] else off)
    if problems:
        raise InvalidOptionsError("\n".join(problems))
    flat = nested((list(path), given[name]) for name, path in SETTINGS.items() if name in given)
    merged = {section: {**tables.get(section, {}), **flat.get(section, {})} for section in [*tables, "engine"]}
    preset = {PRESET: given[PRESET]} if PRESET in given else {}
    return preset | {section: table for section, table in merged.items() if table}


def _twice(given: Table, tables: dict[str, Table]) -> Iterator[str]:
    for name, (section, option) in SETTINGS.items():
        if name in given and option in tables.get(section, {}):
            yield f"{name}: given twice, also inside {section}"


def _contradictions(name: str, value: Any, plugin: str | None) -> Iterator[str]:
    section, on, _ = SWITCHES[name]
    if not isinstance(value, bool):
        yield f"{name}: must be True or False (got {value!r})"
    elif plugin is not None and value != (plugin == on):
        meaning = f' is short for {section} = "{on}" and' if value else ""
        yield f'{name}={value}{meaning} contradicts {section} = "{plugin}"; leave one of them out'
