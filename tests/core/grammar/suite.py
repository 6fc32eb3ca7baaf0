"""The JSON Schema test suite (draft 2020-12), cut to schemas, instances and verdicts; see suite.LICENSE for whose it is.

From the sdist of jsonschema 4.26: json/tests/draft2020-12 and its optional/format, without refRemote and vocabulary, which need documents
from elsewhere.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from octavo.core.errors import RequestError
from octavo.core.grammar.engine import new_matcher, new_tokenizer, problem_of
from octavo.core.grammar.notation import as_lark, explained
from octavo.core.structured_outputs import StructuredOutputsParams


class Group(NamedTuple):
    """One schema and instances, each with whether it is valid."""

    topic: str  # the suite's file: mostly a keyword
    description: str
    schema: Any
    instances: list[tuple[Any, bool]]

    @property
    def name(self) -> str:
        """For test ids."""
        return f"{self.topic}: {self.description}"


@cache
def groups() -> list[Group]:
    """All of them."""
    suite = json.loads((Path(__file__).parent / "suite.json").read_text())
    return [
        Group(topic, group["description"], group["schema"], [(data, valid) for data, valid in group["tests"]])
        for topic, many in suite.items()
        for group in many
    ]


@cache
def verdicts() -> list[tuple[Group, Any, str]]:
    """Each group with llguidance's matcher over bytes, and why its schema cannot be compiled ("" if it can).

    In this process: the suite is harmless.
    """
    tokenizer = new_tokenizer([bytes([byte]) for byte in range(256)] + [b"<end>"], 256)
    found: list[tuple[Group, Any, str]] = []
    for group in groups():
        try:
            matcher = new_matcher(tokenizer, as_lark(StructuredOutputsParams(json=json.dumps(group.schema))))
        except RequestError as error:
            found.append((group, None, str(error)))
            continue
        matcher.compute_bitmask()
        found.append((group, matcher, explained(problem_of(matcher), "json")))
    return found


def compiled() -> list[Group]:
    """Those whose schemas can be followed."""
    return [group for group, _, error in verdicts() if not error]
