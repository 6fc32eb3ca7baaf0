"""The `octavo` command: one module a command, with `add_parser(subparsers)` and `run(args) -> int`. Only the one asked for is imported.

Must not know: what a command does.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from octavo.core.errors import ConfigError, OctavoError, RequestError

COMMANDS = {
    "generate": "continue prompts",
    "chat": "talk to a model in the terminal",
    "demo": "answer with a real model, then run the same prompts on every installed stack",
    "plugins": "list installed plugins, their options, and packages that failed to load",
    "presets": "list named configs and what they set",
    "stacks": "list combinations of plugins, which run, and why the others don't",
    "schema": "print the JSON schema of a config file",
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of `command` alone: the other commands' modules aren't imported."""
    parser = argparse.ArgumentParser(prog="octavo", description="An LLM inference engine made of plugins.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name == command:
            importlib.import_module(f"octavo.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status: 2 for wrong settings, 1 for any other error of ours, which is printed without a traceback."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in argv if not word.startswith("-")), None)
    args = build_parser(command).parse_args(argv)
    try:
        status = importlib.import_module(f"octavo.cli.{args.command}").run(args)
        sys.stdout.flush()
        return int(status)
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | RequestError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `octavo plugins | head`: nobody reads on
        sys.stderr.close()
        return 141
