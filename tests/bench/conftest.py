"""An engine on the fake runner whose steps take a second each, on a clock that the test holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.outputs import StepReport
from octavo.core.testing.rig import Rig
from tests.core.conftest import make_rig

STEP_S = 1.0


class Ticking:
    """An observer that lets time pass at the end of each step."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def octavo_step_finished(self, report: StepReport) -> None:
        """A second has passed."""
        self._rig.clock.advance(STEP_S)


def ticking_rig(*args: Any, **options: Any) -> Rig:
    """`make_rig` with steps that take a second."""
    rig = make_rig(*args, **options)
    rig.engine.observers.add(Ticking(rig))
    return rig


@pytest.fixture
def new_rig() -> Callable[..., Rig]:
    """`ticking_rig`, for the tests of this folder."""
    return ticking_rig
