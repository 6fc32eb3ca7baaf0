"""Where settings come from: a TOML file, the environment, the command line, Python. Each becomes one nested mapping, a layer.

Must not know: which options or plugins exist.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidOptionsError

PREFIX = "OCTAVO_SET_"
SHORTHAND = {"model": "source", "scheduler": "plugin", "allocator": "plugin", "kernel": "plugin", "ops": "plugin"}  # scheduler = "static"

Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings of one source. `origin` names it in error messages; "" for what the caller just wrote."""

    origin: str
    settings: Mapping[str, Any]


def from_file(path: str | Path) -> Layer:
    """Read a TOML file."""
    try:
        return Layer(str(path), merge({}, tomllib.loads(Path(path).read_text(encoding="utf-8"))))
    except OSError as error:
        raise InvalidOptionsError(f"config file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # what TOML refuses, and what Python refuses to read as a number
        raise InvalidOptionsError(f"config file {path} is not valid TOML: {error}") from error


def from_environment(environ: Mapping[str, str]) -> Layer:
    """Read `OCTAVO_SET_SCHEDULER__MAX_NUM_SEQS=8`: two underscores stand for a dot."""
    pairs = ((name.removeprefix(PREFIX).lower().split("__"), text) for name, text in sorted(environ.items()) if name.startswith(PREFIX))
    return Layer("environment", nested((path, value_of(text)) for path, text in pairs))


def from_command_line(settings: Iterable[str]) -> Table:
    """Read `--set scheduler.max_num_seqs=8` texts into the `overrides` of `load_config`."""
    pairs = []
    for text in settings:
        path, equals, value = text.partition("=")
        if not equals or not all(path.strip().split(".")):
            raise InvalidOptionsError(f"--set {text}: write --set SECTION.NAME=VALUE, like --set scheduler.max_num_seqs=8")
        pairs.append((path.strip().split("."), value_of(value)))
    return nested(pairs)


def value_of(text: str) -> Any:
    """The TOML value that `text` writes (8, 0.5, true, [1, 2], {a = 1}, "8"); any other text stands for itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # what TOML refuses, and what Python refuses to read as a number
        return text
    is_plain = parsed.keys() == {"value"} and isinstance(parsed["value"], bool | int | float | str | list | dict)
    return parsed["value"] if is_plain else text


def nested(pairs: Iterable[tuple[list[str], Any]]) -> Table:
    """`[(["a", "b"], 1), (["a", "c"], 2)]` as `{"a": {"b": 1, "c": 2}}`."""
    tree: Table = {}
    for path, value in pairs:
        for name in reversed(path):
            value = {name: value}
        tree = merge(tree, value)
    return tree


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Table:
    """Both, `upper` winning: tables merge, everything else replaces. A text in place of a section's table stands for a short table."""
    return _merge(_in_full(lower), _in_full(upper))


def _in_full(sections: Mapping[str, Any]) -> Table:
    short = {name: value for name, value in sections.items() if name in SHORTHAND and isinstance(value, str)}
    return {**sections, **{name: {SHORTHAND[name]: value} for name, value in short.items()}}


def _merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Table:
    merged = dict(lower)
    for name, value in upper.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def origin_of(path: Iterable[str], layers: list[Layer]) -> str:
    """The topmost layer that sets this path, for an error message: ` [octavo.toml]`, or "" where the caller wrote it."""
    path = list(path)
    for layer in reversed(layers):
        value: Any = layer.settings
        for name in path:
            value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT:
            return f" [{layer.origin}]" if layer.origin else ""
    return ""


_ABSENT = object()
