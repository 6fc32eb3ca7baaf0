"""TOML file, environment, command line and Python settings become one checked `EngineConfig`.

Precedence: defaults < preset < file < environment < command line or Python. All that is wrong is reported at once, each with its place
and, where it was not just typed, its source. What needs the model (its length, `auto` choices) is left to `octavo.core.settings.resolve`.
Must not know: models, devices, torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from octavo.core.descriptors import KINDS
from octavo.core.errors import InvalidOptionsError, OctavoError
from octavo.core.options import SchedulerOptions
from octavo.core.registry import Registry
from octavo.core.settings.engine import EngineSettings
from octavo.core.settings.layers import Layer, Table, from_environment, from_file, merge, origin_of
from octavo.core.settings.presets import KEY as PRESET, preset_layer
from octavo.core.stack import Choice
from octavo.core.suggest import did_you_mean

logger = logging.getLogger("octavo.config")

AUTO = "auto"
DEFAULTS = Layer(
    "default",
    {
        "model": {"plugin": AUTO, "source": "smollm2-135m"},
        "scheduler": {"plugin": "chunked"},
        "allocator": {"plugin": "prefix"},
        "kernel": {"plugin": AUTO},
        "ops": {"plugin": AUTO},
        "engine": {},
        "server": {},  # what is in it is the server's business
    },
)
AUTO_KINDS = tuple(kind for kind in KINDS if DEFAULTS.settings[kind]["plugin"] == AUTO)  # the others take a name only
USUAL_UTILIZATION = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Checked settings. A plugin that is None is `auto`: chosen by `octavo.core.settings.resolve` once model and device are known."""

    source: str
    revision: str | None  # of a hub repository
    trust_remote_code: bool  # a model's config may name Python code of its own; it is not run by Octavo's own models
    model: Choice | None
    scheduler: Choice
    allocator: Choice
    kernel: Choice | None
    ops: Choice | None
    engine: EngineSettings
    server: BaseModel | None = None  # checked by the model that was given to `load_config`


def load_config(
    registry: Registry,
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    server: type[BaseModel] | None = None,
) -> EngineConfig:
    """Merge and check the settings of all sources. `environ` is os.environ unless given; `overrides` has sections like the file.

    `server`: what the `[server]` table must fit; without it the table may hold anything, for other commands share the file.
    Raises `InvalidOptionsError` with every problem; a plugin that can't be had, alone, is the registry's own error.
    """
    written = [from_file(file)] if file is not None else []
    written += [from_environment(os.environ if environ is None else environ), Layer("", merge({}, overrides or {}))]
    return _Loader(registry, written).load(server)


class _Loader:
    """Collects problems while it checks section by section."""

    def __init__(self, registry: Registry, written: list[Layer]) -> None:
        self.registry = registry
        self.problems: list[str | OctavoError] = []
        self.layers = [DEFAULTS, *self._preset(written), *written]

    def load(self, server: type[BaseModel] | None) -> EngineConfig:
        tables = self._sections()
        source = tables["model"].pop("source", None)
        if not (isinstance(source, str) and source):
            self.problems.append(f"model.source: must name a model, a folder or a file (got {source!r}){self._origin('model', 'source')}")
        revision, trust = tables["model"].pop("revision", None), tables["model"].pop("trust_remote_code", False)
        if revision is not None and not (isinstance(revision, str) and revision):
            self.problems.append(f"model.revision: must be a branch, tag or commit (got {revision!r}){self._origin('model', 'revision')}")
        if not isinstance(trust, bool):
            self.problems.append(
                f"model.trust_remote_code: must be true or false (got {trust!r}){self._origin('model', 'trust_remote_code')}"
            )
        choices = {kind: self._choice(kind, tables[kind]) for kind in KINDS}
        engine = cast(EngineSettings | None, self._validated(EngineSettings, tables["engine"], ("engine",)))
        served = None if server is None else self._validated(server, tables["server"], ("server",))
        self._check_together(choices["scheduler"], engine)
        self._raise()
        _warn(self.registry, engine := cast(EngineSettings, engine))
        return EngineConfig(source=source, revision=revision, trust_remote_code=trust, engine=engine, server=served, **cast(Any, choices))

    def _preset(self, written: list[Layer]) -> list[Layer]:
        try:
            layer = preset_layer(written)
        except InvalidOptionsError as error:
            self.problems.append(error)
            return []
        return [] if layer is None else [layer]

    def _sections(self) -> dict[str, Table]:
        merged: Table = {}
        for layer in self.layers:
            merged = merge(merged, layer.settings)
        names = [*DEFAULTS.settings, PRESET]
        for name in (name for name in merged if name not in names):
            known = ", ".join(DEFAULTS.settings)
            self.problems.append(f"{name}: no such section{did_you_mean(name, names)}; sections are {known}{self._origin(name)}")
        tables: dict[str, Table] = {}
        for name in DEFAULTS.settings:
            table = merged[name]
            if not isinstance(table, Mapping):
                self.problems.append(f"{name}: must be a table of settings (got {table!r}){self._origin(name)}")
            tables[name] = dict(table if isinstance(table, Mapping) else DEFAULTS.settings[name])
        return tables

    def _choice(self, kind: str, table: Table) -> Choice | None:
        name = table.pop("plugin", None)
        if not isinstance(name, str):
            self.problems.append(f"{kind}.plugin: must be a plugin's name (got {name!r}){self._origin(kind, 'plugin')}")
            return None
        if name == AUTO and kind in AUTO_KINDS:
            for option in table:
                origin = self._origin(kind, option)
                self.problems.append(
                    f"{kind}.{AUTO}.{option}: Extra inputs are not permitted (name the {kind} plugin to set its options){origin}"
                )
            return None
        try:
            plugin = self.registry.get(kind, name)
        except OctavoError as error:
            self.problems.append(error)
            return None
        options = self._validated(plugin.options, table, (kind, name))
        return None if options is None else Choice(plugin, cast(Any, options))

    def _validated(self, model: type[BaseModel], table: Table, where: tuple[str, ...]) -> BaseModel | None:
        try:
            return model.model_validate(table)
        except ValidationError as error:
            for fault in error.errors():
                path = tuple(str(name) for name in fault["loc"])
                self.problems.append(f"{'.'.join(where + path)}: {self._message(fault, model, where)}{self._origin(where[0], *path)}")
            return None

    def _message(self, fault: Any, model: type[BaseModel], where: tuple[str, ...]) -> str:
        if fault["type"] == "value_error":
            return str(fault["ctx"]["error"])
        if fault["type"] == "missing":
            return str(fault["msg"])
        if fault["type"] != "extra_forbidden":
            secret = any("key" in str(part) for part in fault["loc"])  # an API key is not for a terminal or a log
            return str(fault["msg"]) if secret else f"{fault['msg']} (got {fault['input']!r:.60})"
        name, top_level = str(fault["loc"][-1]), len(fault["loc"]) == 1
        owners = [
            plugin.name
            for plugin in (self.registry.descriptors(where[0]) if top_level and where[0] in KINDS else ())
            if name in plugin.options.model_fields
        ]
        if owners:
            return f"{fault['msg']} (it is an option of {where[0]} {' and '.join(map(repr, owners))})"
        return f"{fault['msg']}{did_you_mean(name, model.model_fields if top_level else _nested_names(model))}"

    def _check_together(self, scheduler: Choice | None, engine: EngineSettings | None) -> None:
        options = scheduler.options if scheduler else None
        if isinstance(options, SchedulerOptions) and options.preemption == "swap" and engine is not None and engine.swap_space == 0:
            self.problems.append(
                f"scheduler.{cast(Choice, scheduler).name}.preemption: 'swap' keeps preempted requests in host memory, "
                f"which needs engine.swap_space > 0{self._origin('scheduler', 'preemption')}"
            )

    def _origin(self, *path: str) -> str:
        return origin_of(path, self.layers)

    def _raise(self) -> None:
        if not self.problems:
            return
        if len(self.problems) == 1:
            only = self.problems[0]
            raise only if isinstance(only, OctavoError) else InvalidOptionsError(only)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        raise InvalidOptionsError(f"{len(self.problems)} settings cannot be used:{lines}")


def _nested_names(model: type[BaseModel]) -> Iterator[str]:
    for definition in model.model_json_schema().get("$defs", {}).values():
        yield from definition.get("properties", {})


def _warn(registry: Registry, engine: EngineSettings) -> None:
    if engine.gpu_memory_utilization > USUAL_UTILIZATION:
        logger.warning(
            "gpu_memory_utilization = %g leaves little of the device to everything else; 0.85 to %g is usual",
            engine.gpu_memory_utilization,
            USUAL_UTILIZATION,
        )
    for problem in registry.problems():
        logger.warning("plugin not usable: %s", problem)
