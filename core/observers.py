"""Observers are told what happened and change nothing. One that raises is logged and dropped: it never stops the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pluggy

from octavo.core.hookspecs import OBSERVER_HOOKS

logger = logging.getLogger("octavo")

EVENTS = {hook.removeprefix("octavo_"): (hook, argument) for hook, argument in OBSERVER_HOOKS.items()}


class Observers:
    """The listeners of one engine, by event. An observer is any object with one or more methods named `octavo_<event>`."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[tuple[object, Callable[..., Any]]]] = {event: [] for event in EVENTS}

    def add(self, observer: object) -> None:
        """Tell this observer from now on."""
        for event in EVENTS:
            method = getattr(observer, f"octavo_{event}", None)
            if method is not None:
                self._listeners[event].append((observer, method))

    def add_hooks(self, hooks: pluggy.HookRelay) -> None:
        """Tell a plugin's observer hooks from now on."""
        for event, (hook, argument) in EVENTS.items():
            caller = getattr(hooks, hook, None)
            if caller is not None and caller.get_hookimpls():
                self._listeners[event].append((hooks, lambda subject, caller=caller, argument=argument: caller(**{argument: subject})))

    def remove(self, observer: object) -> None:
        """Tell it no more."""
        for event, listeners in self._listeners.items():
            self._listeners[event] = [entry for entry in listeners if entry[0] is not observer]

    def wanted(self, event: str) -> bool:
        """Somebody listens: only then is it worth making a report."""
        return bool(self._listeners[event])

    def tell(self, event: str, subject: object) -> None:
        """Call all listeners of an event; those that raise are dropped."""
        for observer, method in list(self._listeners[event]):
            try:
                method(subject)
            except Exception:
                logger.exception("observer %r failed in %s and is dropped", observer, event)
                self.remove(observer)
