"""The hooks are documented and complete."""

from __future__ import annotations

import inspect

import pluggy
import pytest

from octavo.core import hookspecs
from octavo.core.descriptors import KINDS
from octavo.core.hookspecs import DESCRIPTOR_HOOKS, OBSERVER_HOOKS


def declared() -> dict[str, pluggy.HookCaller]:
    manager = pluggy.PluginManager("octavo")
    manager.add_hookspecs(hookspecs)
    return {name: getattr(manager.hook, name) for name in vars(manager.hook) if not name.startswith("_")}


def test_there_are_eight_hooks_and_the_loader_knows_each() -> None:
    """A hook that nobody calls, or that is called but not declared, is a mistake."""
    assert declared().keys() == {*DESCRIPTOR_HOOKS, *OBSERVER_HOOKS}
    assert len(declared()) == 8
    assert set(DESCRIPTOR_HOOKS.values()) == set(KINDS)


@pytest.mark.parametrize("hook", declared())
def test_every_hook_says_what_it_is_for(hook: str) -> None:
    """A hook without a docstring of its own fails here."""
    text = inspect.getdoc(getattr(hookspecs, hook))
    assert text is not None
    assert len(text) > 40
    assert text.endswith(".")


@pytest.mark.parametrize(("hook", "argument"), OBSERVER_HOOKS.items())
def test_observers_get_one_argument(hook: str, argument: str) -> None:
    """The name that the loader passes is the one that the spec declares."""
    assert list(inspect.signature(getattr(hookspecs, hook)).parameters) == [argument]
