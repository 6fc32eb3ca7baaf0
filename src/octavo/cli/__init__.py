"""The `octavo` command: one module a command, with `add_parser(subparsers)` and `run(args) -> int`. Only the one asked for is imported.

Must not know: what a command does.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from octavo._version import __version__
from octavo.core.errors import ConfigError, OctavoError, RequestError

COMMANDS = {
    "generate": "continue prompts",
    "chat": "talk to a model in the terminal",
    "serve": "serve a model through an OpenAI-compatible API",
    "doctor": "judge the settings of a running server by its metrics",
    "ablate": "compare stacks that differ in one part: same tokens, speed, memory, with intervals",
    "demo": "answer with a real model, then run the same prompts on every installed stack",
    "bench": "measure latency and throughput",
    "trace": "make a trace of a request log, without its text",
    "plugins": "list installed plugins, their options, and packages that failed to load",
    "presets": "list named configs and what they set",
    "stacks": "list combinations of plugins, which run, and why the others don't",
    "schema": "print the JSON schema of a config file",
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of `command` alone: the other commands' modules aren't imported."""
    parser = argparse.ArgumentParser(prog="octavo", description="An LLM inference engine made of plugins.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name == command:
            importlib.import_module(f"octavo.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    2: the settings or the request cannot be used, 1: any other error of ours; both are printed without a traceback. 130: Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if sys.stdout is None:  # `octavo plugins >&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another, and loses nothing else
    command = next((word for word in argv if not word.startswith("-")), None)
    parser = build_parser(command)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(argv)
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain when it flushes at its end
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"octavo: the output could not be written: {error.strerror}", file=sys.stderr)
        return 1
