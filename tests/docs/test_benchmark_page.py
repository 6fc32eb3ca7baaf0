"""The commands of docs/howto/benchmark.md are ones that `octavo` takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from octavo.cli import build_parser

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "benchmark.md"
COMMANDS = [" ".join(found.split("\\\n")) for found in re.findall(r"^    octavo ((?:.*\\\n)*.*)$", PAGE.read_text(), flags=re.MULTILINE)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page(command: str) -> None:
    """With all its flags."""
    words = shlex.split(command, comments=True)
    assert build_parser(words[0]).parse_args(words).command == words[0]


def test_there_are_some() -> None:
    """Each kind of `octavo bench`, and the trace."""
    assert {tuple(command.split()[:2]) for command in COMMANDS} == {
        ("bench", "serve"), ("bench", "offline"), ("bench", "latency"), ("bench", "startup"), ("trace", "anonymise"),
    }  # fmt: skip
