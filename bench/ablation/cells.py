"""Cells of an ablation in one scenario: settings become checked configs, and each differs from its parent by exactly one part.

A part is a plugin with its own options, a limit that all schedulers share, or a setting of the engine. The pool, the context and the
device are no parts: they are the same in all cells, or the comparison would be of memory, not of plugins.
Must not know: plugins by name, workloads, torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.bench.ablation.spec import AblationSpec, CellSpec, Sections
from octavo.core.descriptors import KINDS
from octavo.core.errors import InvalidOptionsError
from octavo.core.options import SchedulerOptions
from octavo.core.registry import Registry
from octavo.core.settings.config import EngineConfig, load_config
from octavo.core.settings.engine import EngineSettings
from octavo.core.settings.layers import merge, value_of
from octavo.core.settings.presets import PRESETS
from octavo.core.stack import Choice, Stack
from octavo.core.suggest import did_you_mean

SHARED_LIMITS = tuple(name for name in SchedulerOptions.model_fields if name != "max_num_batched_tokens")  # the budget is the policy's own
ENGINE_PARTS = ("dtype", "kv_dtype", "speculative_config", "swap_space")
SAME_IN_ALL = tuple(name for name in EngineSettings.model_fields if name not in ENGINE_PARTS)

Parts = dict[str, str]
"""What a stack is made of: by part, a text that differs where the part does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One stack of the ablation, its config, and what it changed."""

    name: str
    parent: str | None
    change: str  # "allocator: contiguous -> paged"; "" for a baseline
    config: EngineConfig


def make_cells(registry: Registry, spec: AblationSpec, scenario: str) -> list[Cell]:
    """The cells as they run in this scenario, each after its parent.

    Raises InvalidOptionsError where a setting cannot be used or a cell does not differ from its parent by exactly one part, and the
    registry's errors where a plugin cannot be had.
    """
    common = merge(merge(_model(spec), spec.settings), spec.scenarios[scenario].settings)
    cells: dict[str, Cell] = {}
    written: dict[str, Sections] = {}
    for name, given in spec.ordered():
        parent = cells.get(given.parent or "")
        written[name] = _settings(given, common, parent, written)
        try:
            config = load_config(registry, environ={}, overrides=written[name])
        except InvalidOptionsError as error:
            raise InvalidOptionsError(f"cells.{name}: {error}") from error
        change = "" if parent is None else check_one_change(name, parent.name, parts_of(config), parts_of(parent.config))
        cells[name] = Cell(name=name, parent=given.parent, change=change, config=config)
    _check_alike(list(cells.values()))
    return list(cells.values())


def parts_of(config: EngineConfig, stack: Stack | None = None) -> Parts:
    """Its parts. With the resolved `stack`, those that were left to `auto` by the names that were chosen."""
    chosen = {kind: getattr(config if stack is None else stack, kind) for kind in KINDS}
    parts = {kind: "auto" if choice is None else _choice_text(choice) for kind, choice in chosen.items()}
    options = chosen["scheduler"].options
    parts |= {f"scheduler.{name}": repr(getattr(options, name)) for name in SHARED_LIMITS}
    return parts | {f"engine.{name}": repr(getattr(config.engine, name)) for name in ENGINE_PARTS}


def check_one_change(name: str, parent: str, parts: Parts, before: Parts) -> str:
    """The one part in which they differ, as text. Raises InvalidOptionsError that names all where they are none or several."""
    changes = [f"{part}: {before[part]} -> {parts[part]}" for part in parts if parts[part] != before[part]]
    if len(changes) == 1:
        return changes[0]
    if not changes:
        raise InvalidOptionsError(f"cells.{name}: it is the same as its parent {parent!r}; change one part of it")
    raise InvalidOptionsError(
        f"cells.{name}: it differs from its parent {parent!r} in {len(changes)} parts ({'; '.join(changes)}), and must in exactly one: "
        "put cells in between that change one part each"
    )


def stack_spec(baseline: str, candidate: str) -> dict[str, CellSpec]:
    """Two cells from two stacks, each a preset's name or written as `octavo stacks` writes it (see `parse_stack`)."""
    return {"baseline": _stack_cell(baseline), "candidate": CellSpec(parent="baseline", settings=_stack_sections(candidate))}


def parse_stack(text: str) -> Sections:
    """`static + contiguous(reservation = max) + sdpa`: scheduler, allocator, kernel, ops and model in this order, the last may be left out.

    Raises InvalidOptionsError where it is not written like that.
    """
    parts = [part.strip() for part in re.split(r"\+(?![^(]*\))", text)]
    kinds = ("scheduler", "allocator", "kernel", "ops", "model")
    if not 2 <= len(parts) <= len(kinds):
        raise InvalidOptionsError(
            f"{text!r} is no stack: write a preset's name ({', '.join(PRESETS)}) or SCHEDULER + ALLOCATOR [+ KERNEL [+ OPS [+ MODEL]]], "
            f"as octavo stacks does{did_you_mean(text, PRESETS)}"
        )
    return {kind: _parse_part(part, text) for kind, part in zip(kinds, parts, strict=False)}


def _parse_part(part: str, text: str) -> dict[str, Any]:
    found = re.fullmatch(r"(\w+)(?:\(([^()]*)\))?", part)
    if found is None:
        raise InvalidOptionsError(f"{part!r} in the stack {text!r} is no plugin: write a name, or NAME(OPTION = VALUE, ...)")
    table: dict[str, Any] = {"plugin": found[1]}
    for pair in filter(None, (pair.strip() for pair in (found[2] or "").split(","))):
        option, equals, value = pair.partition("=")
        if not equals:
            raise InvalidOptionsError(f"{pair!r} in the stack {text!r} is no option: write OPTION = VALUE")
        table[option.strip()] = value_of(value.strip())
    return table


def _stack_cell(text: str) -> CellSpec:
    return CellSpec(preset=text) if text in PRESETS else CellSpec(settings=parse_stack(text))


def _stack_sections(text: str) -> Sections:
    return dict(PRESETS[text].settings) if text in PRESETS else parse_stack(text)


def _model(spec: AblationSpec) -> Sections:
    return {"model": {"source": spec.model, **({"revision": spec.revision} if spec.revision else {})}}


def _settings(given: CellSpec, common: Sections, parent: Cell | None, written: Mapping[str, Sections]) -> Sections:
    """All of a cell's settings: where it names another plugin than its parent, the old one's options go, and the shared limits stay."""
    if parent is None:
        origin = {} if given.preset is None else {"preset": given.preset}
        return merge(merge(common, origin), given.settings)
    below = dict(written[parent.name])
    change = merge({}, given.settings)
    for kind in KINDS:
        table = change.get(kind)
        old: Choice | None = getattr(parent.config, kind)
        if isinstance(table, Mapping) and "plugin" in table and table["plugin"] != (old.name if old else None):
            keep = SHARED_LIMITS if kind == "scheduler" else ("source", "revision", "trust_remote_code") if kind == "model" else ()
            kept = {option: value for option, value in below.get(kind, {}).items() if option in keep}
            below[kind] = {**common.get(kind, {}), **kept}
    return merge(below, change)


def _choice_text(choice: Choice) -> str:
    """The plugin and those of its own options that are not the default."""
    given = choice.options.model_dump()
    own = {
        name: value
        for name, value in given.items()
        if not (choice.kind == "scheduler" and name in SHARED_LIMITS) and value != type(choice.options).model_fields[name].get_default()
    }
    return choice.name + (f"({', '.join(f'{name}={value}' for name, value in own.items())})" if own else "")


def _check_alike(cells: list[Cell]) -> None:
    first = cells[0]
    if first.config.engine.num_kv_slots is None and first.config.engine.kv_cache_memory is None:
        raise InvalidOptionsError(
            "settings.engine: set num_kv_slots or kv_cache_memory: "
            "the pool must be equal in all cells, and its default depends on free memory"
        )
    for cell in cells[1:]:
        for where, value, expected in _compared(cell.config, first.config):
            if value != expected:
                raise InvalidOptionsError(
                    f"cells.{cell.name}: {where} is {value!r}, but {expected!r} in {first.name!r}; model, pool, context and device must be "
                    "the same in all cells: set it in [settings], or make another scenario"
                )


def _compared(config: EngineConfig, other: EngineConfig) -> Iterator[tuple[str, object, object]]:
    yield "model.source", config.source, other.source
    yield "model.revision", config.revision, other.revision
    for name in SAME_IN_ALL:
        yield f"engine.{name}", getattr(config.engine, name), getattr(other.engine, name)
