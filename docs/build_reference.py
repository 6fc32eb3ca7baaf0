"""Write docs/reference from the code: hooks, options, presets, sampling parameters, the command line, workloads, stacks, mutants, faults,
the config's JSON schema.

`python docs/build_reference.py` writes; with `--check` it only says which page is out of date (exit status 1).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from octavo.bench.workloads import WORKLOADS
from octavo.cli import COMMANDS, build_parser
from octavo.cli.presets import as_toml
from octavo.core import beam_search_params, hookspecs
from octavo.core.capabilities import CAPABILITIES
from octavo.core.compat import markdown_table, reports
from octavo.core.descriptors import KINDS
from octavo.core.options import ClassLimits
from octavo.core.parameters import allowed
from octavo.core.registry import Registry
from octavo.core.sampling_params import FIELDS
from octavo.core.settings.engine import EngineSettings, SpeculativeConfig
from octavo.core.settings.presets import PRESETS
from octavo.core.settings.schema import json_schema
from octavo.core.sources import CATALOGUE, DEFAULT_MODEL

FOLDER = Path(__file__).parent / "reference"


def hooks() -> str:
    """The hooks, each with its arguments and what it is for."""
    lines = ["# Hooks", "", "A plugin is a module that implements one or more of these with `octavo.core.hookspecs.hookimpl`.", ""]
    for name in (*hookspecs.DESCRIPTOR_HOOKS, *hookspecs.OBSERVER_HOOKS):
        function = getattr(hookspecs, name)
        arguments = ", ".join(f"{p.name}: {p.annotation}" for p in inspect.signature(function).parameters.values())
        returns = inspect.signature(function).return_annotation
        lines += [f"## `{name}({arguments}) -> {returns}`", "", inspect.getdoc(function) or "", ""]
    lines += [
        "## Capabilities",
        "",
        "Words for a descriptor's `provides` and `needs`.",
        "",
        "| word | meaning | provided by |",
        "|---|---|---|",
    ]
    lines += [f"| `{word}` | {meaning.meaning} | {meaning.provided_by} |" for word, meaning in CAPABILITIES.items()]
    return "\n".join(lines) + "\n"


def options(registry: Registry) -> str:
    """The sections of a config and their options."""
    lines = ["# Options", "", "## `[engine]`", "", *_fields(EngineSettings), ""]
    lines += ["## `[engine.speculative_config]`", "", *_fields(SpeculativeConfig), ""]
    for kind in KINDS:
        for plugin in registry.descriptors(kind):
            lines += [
                f'## `[{kind}]` with `plugin = "{plugin.name}"`',
                "",
                f"{plugin.summary[0].upper()}{plugin.summary[1:].rstrip('.')}.",
                "",
            ]
            lines += [*_fields(plugin.options), ""]
    lines += ["## Limits of a class", "", "In `[scheduler.classes.NAME]`.", "", *_fields(ClassLimits)]
    return "\n".join(lines) + "\n"


def _fields(model: Any) -> list[str]:
    if not model.model_fields:
        return ["No options."]
    rows = ["| option | default | what it is |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        rows.append(f"| `{name}` | {'unset' if default is None else f'`{json.dumps(default)}`'} | {field.description} |")
    return rows


def sampling() -> str:
    """The sampling parameters, and those of beam search."""
    lines = ["# Sampling parameters", "", *_parameters(FIELDS), "", "# Parameters of beam search", ""]
    lines += ["For `LLM.beam_search`; the same as `generate(num_beams=..., num_return_sequences=...)` of transformers gives.", ""]
    lines += _parameters(beam_search_params.FIELDS)
    return "\n".join(lines) + "\n"


def _parameters(fields: Mapping[str, FieldInfo]) -> list[str]:
    lines = ["| parameter | default | allowed | what it is |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if field.is_required() else f"`{field.default!r}`"
        lines.append(f"| `{name}` | {default} | {allowed(field)} | {field.description} |")
    return lines


def presets() -> str:
    """The presets, each as the config that it stands for."""
    lines = [
        "# Presets",
        "",
        "Named configs: what `octavo presets` prints. Use one with `--preset NAME`, `LLM(preset=NAME)`, `OCTAVO_SET_PRESET=NAME`,",
        'or `preset = "NAME"` at the top of a config file. All other settings win over it ([how to](../howto/presets.md)).',
        "",
    ]
    for preset in PRESETS.values():
        lines += [
            f"## {preset.name}",
            "",
            f"{preset.summary[0].upper()}{preset.summary[1:]}.",
            "",
            "```toml",
            as_toml(preset.settings),
            "```",
            "",
        ]
    return "\n".join(lines)


def command_line() -> str:
    """What `octavo --help` and the help of each command print."""
    os.environ.update(COLUMNS="120", NO_COLOR="1")
    lines = ["# Command line", "", "```", build_parser().format_help().strip(), "```", ""]
    for name in COMMANDS:
        lines += _command_help(f"octavo {name}", _parsers(build_parser(name))[name])
    return "\n".join(lines)


def _command_help(title: str, command: argparse.ArgumentParser) -> list[str]:
    lines = [f"## {title}", "", "```", command.format_help().strip(), "```", ""]
    for name, inner in _parsers(command).items():
        lines += _command_help(f"{title} {name}", inner)
    return lines


def _parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands within a command, by name."""
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}


def workloads() -> str:
    """The workloads and their options."""
    lines = [
        "# Workloads",
        "",
        "For `octavo bench`: `--dataset-name NAME`, and an option as `--NAME-OPTION` (`path`: `--dataset-path`).",
        "",
    ]
    for workload in WORKLOADS.values():
        lines += [f"## {workload.name}", "", f"{inspect.getdoc(workload.make)}", "", *_fields(workload.options), ""]
    return "\n".join(lines)


def stacks(registry: Registry) -> str:
    """Which stacks run, for the default model on a CPU and on a CUDA device."""
    config = CATALOGUE[DEFAULT_MODEL].config
    lines = [
        "# Stacks",
        "",
        f"Every combination of the built-in plugins, for `{DEFAULT_MODEL}` in fp32: what `octavo stacks --explain` prints.",
        "",
    ]
    for device in ("cpu", "cuda"):
        rows = list(reports(registry, config, device=device, dtype="float32", kv_dtype="float32"))
        lines += [f"## On `{device}`", "", markdown_table(rows)]
    return "\n".join(lines)


def mutants() -> str:
    """What was broken on purpose, and who notices: the tables of the tests."""
    sys.path.insert(0, str(FOLDER.parents[1]))
    from tests.core.test_mutants import MUTANTS as engine
    from tests.plugins.allocators.test_mutants import MUTANTS as allocators

    lines = [
        "# Mutants",
        "",
        "Tests break one promise at a time and see that somebody notices.",
        "",
        "| what is broken | who notices |",
        "|---|---|",
    ]
    lines += [f"| {name} | {mutant.noticed_by} |" for table in (engine, allocators) for name, mutant in table.items()]
    return "\n".join(lines) + "\n"


def faults() -> str:
    """Known faults of engines, and the tests whose docstring names them."""
    sentences = tomllib.loads((FOLDER.parent / "faults.toml").read_text(encoding="utf-8"))
    tests: dict[str, list[str]] = {number: [] for number in sentences}
    root = FOLDER.parents[1]
    for file in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for numbers in re.findall(r"[Ff]aults? (\d+(?:(?:, | and )\d+)*)", ast.get_docstring(node) or ""):
                    for number in re.findall(r"\d+", numbers):
                        tests[number].append(f"`{file.relative_to(root / 'tests')}::{node.name}`")
    lines = [
        "# Known faults",
        "",
        "What engines of this kind have got wrong, put as what must hold, and the tests that see to it here.",
        "",
    ]
    lines += ["| | what must hold | tests |", "|---|---|---|"]
    lines += [f"| {number} | {text} | {'<br>'.join(dict.fromkeys(tests[number]))} |" for number, text in sentences.items()]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, Callable[[], str]]:
    """File name to the function that writes its text."""
    registry = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
    return {
        "hooks.md": hooks,
        "options.md": lambda: options(registry),
        "sampling.md": sampling,
        "presets.md": presets,
        "command-line.md": command_line,
        "workloads.md": workloads,
        "mutants.md": mutants,
        "faults.md": faults,
        "stacks.md": lambda: stacks(registry),
        "config.schema.json": lambda: json.dumps(json_schema(registry), indent=2, ensure_ascii=False) + "\n",
    }


def main() -> int:
    """Write or check all pages."""
    stale = []
    FOLDER.mkdir(exist_ok=True)
    for name, make in pages().items():
        text, file = make(), FOLDER / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                file.write_text(text, encoding="utf-8")
    print(f"docs/reference: {', '.join(stale) or 'nothing'} {'out of date' if '--check' in sys.argv else 'written'}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
