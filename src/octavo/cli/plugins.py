"""`octavo plugins`: what is installed, with options, and what failed to load. Reads descriptors only; imports no implementation."""

from __future__ import annotations

import argparse
import json
from typing import Any

from octavo.cli import COMMANDS
from octavo.core.descriptors import KINDS, Descriptor
from octavo.core.registry import Registry


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("plugins", help=COMMANDS["plugins"], description=COMMANDS["plugins"])
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Print the list. Returns 1 where a package is broken or a name is provided twice, else 0."""
    registry = Registry.discover()
    rows = [_row(registry, plugin) for kind in KINDS for plugin in registry.descriptors(kind)]
    problems = registry.problems()
    observers = [str(observer.provider) for observer in registry.observers]
    if args.json:
        print(json.dumps({"plugins": rows, "observers": observers, "problems": problems}, indent=2, ensure_ascii=False))
    else:
        _print_table(rows, observers, problems)
    return 1 if problems else 0


def _row(registry: Registry, plugin: Descriptor) -> dict[str, Any]:
    provider = registry.provider(plugin.kind, plugin.name)
    options = {
        name: {"default": getattr(plugin.options(), name), "description": field.description or ""}
        for name, field in plugin.options.model_fields.items()
    }
    return {
        "kind": plugin.kind,
        "name": plugin.name,
        "summary": plugin.summary,
        "distribution": provider.distribution,
        "version": provider.version,
        "options": options,
    }


def _print_table(rows: list[dict[str, Any]], observers: list[str], problems: list[str]) -> None:
    kind = ""
    for row in rows:
        if row["kind"] != kind:
            print(f"{'' if not kind else chr(10)}{row['kind']}")
            kind = row["kind"]
        print(f"  {row['name']:<16} {row['summary']} ({row['distribution']} {row['version']})")
        if row["options"]:
            options = ", ".join(f"{name}={option['default']!r}" for name, option in row["options"].items())
            print(f"  {'':<16} options: {options}")
    for observer in observers:
        print(f"\nobserver: {observer}")
    if not rows:
        print("No plugin is installed, not even the built-in ones: install the octavo distribution (pip install octavo).")
    if problems:
        print("\nNot usable:" + "".join(f"\n  - {problem}" for problem in problems))
