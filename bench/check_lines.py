"""What became of self-checks, in words: each that failed, those that passed in one line, and those that do not apply by their reason.

Must not know: what was checked, how lines are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.bench.self_checks import Checked


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLines:
    """`passed` is empty where none did."""

    failed: list[str]
    passed: str
    not_applicable: list[str]

    @property
    def markdown(self) -> list[str]:
        """All of it as a list."""
        passed = [f"* passed: {self.passed}"] if self.passed else []
        return [*(f"* FAILED: {one}" for one in self.failed), *passed, *(f"* not applicable: {one}" for one in self.not_applicable)]


def check_lines(found: Mapping[str, Sequence[Checked]]) -> CheckLines:
    """`found`: by the name of what was checked; "" where there is but one such thing."""
    each = Counter(one.check for checks in found.values() for one in checks)
    failed, passed, reasons = list[str](), Counter[str](), dict[str, Counter[str]]()
    for where, checks in found.items():
        for one in checks:
            if one.problem:
                failed.append(f"{where}: {one.check}: {one.problem}" if where else f"{one.check}: {one.problem}")
            elif one.not_applicable:
                reasons.setdefault(one.not_applicable, Counter())[one.check] += 1
            else:
                passed[one.check] += 1
    return CheckLines(
        failed=failed,
        passed=_names(passed, each),
        not_applicable=[f"{_names(names, each)}: {reason}" for reason, names in reasons.items()],
    )


def _names(some: Counter[str], each: Counter[str]) -> str:
    """With how many of each they are, where there are several."""
    return ", ".join(name if each[name] == 1 else f"{name} ({count} of {each[name]})" for name, count in some.items())
