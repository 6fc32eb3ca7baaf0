"""What a report says before any figure: which self-checks failed, and so what is not to be believed.

Must not know: runs, ablations.
"""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 3
CONTRADICTION = "The figures contradict each other: do not believe them."
TOO_BUSY = "Times do not add up: the machine was busy, or its steps are very short. Do not rely on small differences."


def warning(said: str, problems: Sequence[str]) -> list[str]:
    """A quotation with the sentence and the first few problems; nothing where there are none."""
    if not problems:
        return []
    more = [f"> and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    plural = "s" * (len(problems) > 1)
    return [f"> **{len(problems)} self-check{plural} failed. {said}**", *(f"> {one}" for one in problems[:SHOWN]), *more, ""]
