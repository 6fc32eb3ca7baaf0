"""`--preset`, `--config`, `--set SECTION.NAME=VALUE` and short forms of the usual settings, for commands that start an engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from octavo.core.garbage import collecting_no_garbage
from octavo.core.registry import Registry
from octavo.core.settings.config import EngineConfig, load_config
from octavo.core.settings.flat import from_flat
from octavo.core.settings.layers import Table, from_command_line, merge, nested
from octavo.core.settings.presets import PRESETS

if TYPE_CHECKING:
    from octavo.core.assembly import LoadedModel
    from octavo.llm import LLM

KINDS = ("scheduler", "allocator", "kernel", "ops")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them. A short form is put before `--set`, which therefore wins."""
    parser.add_argument("--model", metavar="SOURCE", help="folder, hub id, GGUF file or catalogue name (default: smollm2-135m)")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", metavar="PLUGIN", help=f"the {kind} plugin (installed ones: octavo plugins)")
    parser.add_argument("--preset", metavar="NAME", help=f"a named config under all other settings: {', '.join(PRESETS)} (octavo presets)")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with settings")
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="SECTION.NAME=VALUE",
        action="append",
        default=[],
        help="one setting, like scheduler.max_num_seqs=8",
    )


def config_arguments(args: argparse.Namespace, *, flat: Mapping[str, Any] | None = None) -> Table:
    """What these arguments say, in sections like a config file; `flat`: further settings under the flat names of `LLM(...)`."""
    plugins: dict[tuple[str, ...], str | None] = {(kind, "plugin"): getattr(args, kind) for kind in KINDS}
    short: dict[tuple[str, ...], str | None] = {("preset",): args.preset, ("model", "source"): args.model, **plugins}
    given = nested((list(path), value) for path, value in short.items() if value is not None)  # names, also where TOML reads a number
    switched = from_flat(**{kind: getattr(args, kind) for kind in KINDS}, **(flat or {}))
    return merge(merge(switched, given), from_command_line(args.settings))


def config_words(args: argparse.Namespace) -> list[str]:
    """The same arguments as words of a command line, for another process."""
    words: list[str] = []
    for name in ("model", *KINDS, "preset", "config"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name}", value]
    return words + [word for setting in args.settings for word in ("--set", setting)]


def config_from(args: argparse.Namespace, registry: Registry) -> EngineConfig:
    """The checked config of these arguments, over file and environment."""
    return load_config(registry, file=args.config, overrides=config_arguments(args))


def say(line: str) -> None:
    """What a command has to tell besides its output."""
    print(line, file=sys.stderr)


def open_llm(args: argparse.Namespace, *, on_load: Callable[[LoadedModel], object] | None = None) -> LLM:
    """An `LLM` with that config; close it. `on_load` is called when the model is loaded and no pool is there yet.

    For a process that has one: nothing that exists by then is searched for garbage any more, not even after it is closed.
    """
    with collecting_no_garbage(keep=True):  # all that is imported and loaded stays; searching it takes a tenth of torch's import
        registry = Registry.discover()
        config = config_from(args, registry)
        from octavo.core.assembly import build_engine, load_model  # imports torch: not before the settings are known to be right
        from octavo.llm import LLM

        loaded = load_model(registry, config, report=say)
        if on_load is not None:
            on_load(loaded)
        return LLM.from_built(build_engine(registry, config, loaded, report=say))
