"""Reads plugin packages: entry points of group `octavo` -> modules -> checked descriptors and observers.

Our own loader, because pluggy's stops at the first broken plugin and skips duplicates without a word. Here one broken package is one
`PluginLoadError`, with distribution, version and reason, and all others go on. The built-ins pass through it like everybody else.
Must not know: who uses a descriptor, the config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, NamedTuple

import pluggy

from octavo.core import hookspecs
from octavo.core.capabilities import capability
from octavo.core.descriptors import KINDS, Descriptor
from octavo.core.errors import OctavoError, PluginContractError, PluginLoadError
from octavo.core.hookspecs import DESCRIPTOR_HOOKS, OBSERVER_HOOKS
from octavo.core.suggest import did_you_mean

GROUP = "octavo"
BUILT_IN = "octavo"  # the distribution whose plugins `auto` may choose
RESERVED_NAMES = {"auto"}
RESERVED_OPTIONS = {"plugin", "source", "revision", "trust_remote_code"}
NAME = re.compile(r"[a-z0-9_]+")


class Provider(NamedTuple):
    """A distribution that provides plugins."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def built_in(self) -> bool:
        return self.distribution == BUILT_IN


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point and who declares it."""

    name: str
    provider: Provider
    point: EntryPoint

    def __str__(self) -> str:
        return f"{self.provider} (entry point {self.name!r})"


@dataclass(frozen=True, slots=True)
class Observer:
    """A module with at least one observer hook; calling a hook of `hooks` calls this module alone."""

    provider: Provider
    hooks: pluggy.HookRelay


def entries(path: Sequence[str] | None = None) -> Iterator[Entry]:
    """Every entry point of group `octavo` on `path` (default: sys.path), built-ins first. Of two equal distributions the first counts."""
    where: Any = {} if path is None else {"path": list(path)}
    found = {_name(dist): dist for dist in distributions(**where) if f"[{GROUP}]" in (dist.read_text("entry_points.txt") or "")}
    for name in sorted(found, key=lambda name: (name != BUILT_IN, name)):
        dist = next(iter(distributions(name=name, **where)), found[name])
        provider = Provider(name, dist.version or "of unknown version")
        for point in sorted(dist.entry_points.select(group=GROUP), key=lambda point: point.name):
            yield Entry(point.name, provider, point)


def load(entry: Entry) -> tuple[list[Descriptor], Observer | None]:
    """Import the entry's module and collect what its hooks return. Whatever goes wrong inside is a `PluginLoadError` that says why."""
    try:
        module = entry.point.load()
        hooks = _hooks_of(module, entry.name)
        descriptors = [descriptor for hook in DESCRIPTOR_HOOKS for descriptor in _collect(hooks, hook)]
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
        raise PluginLoadError(reason) from error
    observes = any(getattr(hooks, hook).get_hookimpls() for hook in OBSERVER_HOOKS)
    if not descriptors and not observes:
        raise PluginLoadError("its hooks return no descriptor, so it registers nothing")
    return descriptors, Observer(entry.provider, hooks) if observes else None


def check_descriptor(descriptor: object, kind: str) -> None:
    """Raise `PluginContractError` unless `descriptor` is a sound description of a plugin of that kind."""
    if not isinstance(descriptor, KINDS[kind]):
        raise PluginContractError(f"expected a {KINDS[kind].__name__}, got {descriptor!r}")
    where = f"{kind} {descriptor.name!r}"
    if not (isinstance(descriptor.name, str) and NAME.fullmatch(descriptor.name)):
        raise PluginContractError(f"{where}: a name is made of lower-case letters, digits and underscores")
    if descriptor.name in RESERVED_NAMES:
        raise PluginContractError(f"{where}: this name is taken by the config")
    _check_options(descriptor, where)
    if not isinstance(descriptor.provides, frozenset):
        raise PluginContractError(f"{where}: provides must be a frozenset of capabilities, not {descriptor.provides!r}")
    for word in sorted(descriptor.provides):
        try:
            known = capability(word)
        except PluginContractError as error:
            raise PluginContractError(f"{where} provides an {error}") from None
        if known is not None and known.provided_by != kind:
            raise PluginContractError(f"{where} provides {word}, which only {known.provided_by} can provide")


def _check_options(descriptor: Descriptor, where: str) -> None:
    options, base = descriptor.options, descriptor.options_base
    if not (isinstance(options, type) and issubclass(options, base)):
        raise PluginContractError(f"{where}: options must be a class derived from octavo.core.options.{base.__name__}, not {options!r}")
    if options.model_config.get("extra") != "forbid" or not options.model_config.get("frozen"):
        raise PluginContractError(f"{where}: options must keep extra='forbid' and frozen=True")
    if taken := RESERVED_OPTIONS & options.model_fields.keys():
        raise PluginContractError(f"{where}: an option cannot be called {taken.pop()!r}, the config uses that name")
    if required := [name for name, field in options.model_fields.items() if field.is_required()]:
        raise PluginContractError(
            f"{where}: option {required[0]!r} needs a default, so that the plugin can run and be compared as it comes"
        )
    options()


def _hooks_of(module: Any, name: str) -> pluggy.HookRelay:
    """The hooks of this module alone; a misspelt hook, wrong arguments, or no hook at all are a `PluginLoadError`."""
    manager = pluggy.PluginManager("octavo")
    manager.add_hookspecs(hookspecs)
    known = [*DESCRIPTOR_HOOKS, *OBSERVER_HOOKS]
    manager.register(module, name)
    for caller in manager.get_hookcallers(module) or ():
        if not caller.has_spec():
            raise PluginLoadError(f"there is no hook {caller.name!r}{did_you_mean(caller.name, known)}; hooks are {', '.join(known)}")
    manager.check_pending()
    if not manager.get_hookcallers(module):
        unmarked = [hook for hook in known if callable(getattr(module, hook, None))]
        reason = f"{unmarked[0]} is not marked" if unmarked else "no function in it is marked"
        raise PluginLoadError(f"it registers nothing: {reason} with @octavo.core.hookspecs.hookimpl")
    return manager.hook


def _collect(hooks: pluggy.HookRelay, hook: str) -> Iterator[Descriptor]:
    for returned in getattr(hooks, hook)():
        if isinstance(returned, Descriptor):
            raise PluginContractError(f"{hook} must return a list of descriptors, not a single one")
        for descriptor in returned:
            try:
                check_descriptor(descriptor, DESCRIPTOR_HOOKS[hook])
            except PluginContractError as error:
                raise PluginContractError(f"{hook}: {error}") from None
            yield descriptor


def _name(dist: Distribution) -> str:
    return dist.metadata["Name"] or "(unnamed)"
