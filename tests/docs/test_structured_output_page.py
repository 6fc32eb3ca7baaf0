"""docs/explanation/structured-output.md says of each part of the JSON Schema test suite what the installed llguidance does with it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.core.grammar.suite import verdicts

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "structured-output.md"


def table() -> str:
    """Compiled and refused schemas by file, and why."""
    taken, all_of = defaultdict[str, int](int), defaultdict[str, int](int)
    reasons = defaultdict[str, dict[str, None]](dict)
    for group, _, error in verdicts():
        all_of[group.topic] += 1
        taken[group.topic] += not error
        if error:
            short = error.removeprefix("structured_outputs: ").split("\n")[0].split(": Default retriever")[0]
            keys = re.findall(r'"([^"]+)"', short) if short.startswith("Unimplemented keys") else []
            reasons[group.topic].update(dict.fromkeys([f"no `{key}`" for key in keys] or [short.replace("|", "/")]))
    rows = ["| file | followed | refused for |", "|---|---|---|"]
    for topic, count in all_of.items():
        rows.append(f"| {topic} | {taken[topic]} of {count} | {'; '.join(reasons[topic])} |")
    return "\n".join(rows)


def test_the_table_is_what_compiling_finds() -> None:
    """On a difference: put what this prints between the page's marks, and read what changed."""
    text = PAGE.read_text(encoding="utf-8")
    said = text.split("<!-- suite: begin -->\n")[1].split("\n<!-- suite: end -->")[0]
    assert said == table(), f"\n{table()}"
