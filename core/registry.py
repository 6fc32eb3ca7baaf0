"""The installed plugins, by kind and name. An object, so that tests and two engines in one process can have different ones.

Installing a plugin never activates it: a config selects by name, and `auto` considers built-ins only. A package that fails to load and
a name that two packages provide are remembered, listed by `octavo plugins`, and raised when that very name is selected, so that one bad
package doesn't break commands which don't use it. Must not know: what a plugin's name means; no name is special here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from octavo.core import discovery
from octavo.core.descriptors import Descriptor, ModelPlugin
from octavo.core.discovery import BUILT_IN, Entry, Observer, Provider
from octavo.core.errors import DuplicatePluginError, InvalidOptionsError, PluginLoadError, UnknownPluginError
from octavo.core.suggest import did_you_mean

DISABLE_VARIABLE = "OCTAVO_DISABLE_PLUGINS"  # entry points, separated by commas
BUILT_INS_ONLY_VARIABLE = "OCTAVO_NO_PLUGINS"  # 1: no third-party package

AD_HOC = Provider(BUILT_IN, "")


@dataclass(frozen=True, slots=True)
class Failure:
    """A plugin package that could not be used, and why."""

    entry: Entry
    reason: str

    def __str__(self) -> str:
        return f"{self.entry}: {self.reason}"


class Registry:
    """What is installed. `discover` reads the environment; `add` puts single descriptors in, for tests."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[tuple[Descriptor, str, Provider]]] = {}
        self.failures: list[Failure] = []
        self.observers: list[Observer] = []
        self.switched_off: list[Entry] = []

    @classmethod
    def discover(cls, *, environ: Mapping[str, str] = os.environ, path: Sequence[str] | None = None) -> Registry:
        """Load every entry point of group `octavo` found on `path` (default: sys.path) that the environment doesn't switch off.

        Raises `InvalidOptionsError` where one of the two variables makes no sense; a broken package is recorded in `failures` instead.
        """
        registry = cls()
        entries = list(discovery.entries(path))
        off = _switched_off(entries, environ)
        for entry in entries:
            if entry in off:
                registry.switched_off.append(entry)
                continue
            try:
                descriptors, observer = discovery.load(entry)
            except PluginLoadError as error:
                registry.failures.append(Failure(entry, str(error)))
                continue
            for descriptor in descriptors:
                registry._put(descriptor, str(entry), entry.provider)
            if observer is not None:
                registry.observers.append(observer)
        return registry

    def add(self, descriptor: Descriptor, *, provider: Provider = AD_HOC) -> None:
        """Put in one descriptor as if `provider` (default: Octavo) had declared it. Raises `PluginContractError` where it is unsound."""
        discovery.check_descriptor(descriptor, descriptor.kind)
        self._put(descriptor, str(provider), provider)

    def _put(self, descriptor: Descriptor, source: str, provider: Provider) -> None:
        self._found.setdefault((descriptor.kind, descriptor.name), []).append((descriptor, source, provider))

    def names(self, kind: str) -> list[str]:
        """Names of this kind in alphabetical order, also those that two packages provide."""
        return sorted(name for found_kind, name in self._found if found_kind == kind)

    def get(self, kind: str, name: str) -> Descriptor:
        """The plugin of that name.

        Raises `DuplicatePluginError` where two packages provide it, `PluginLoadError` where the entry point of that name failed to load,
        else `UnknownPluginError`.
        """
        found = self._found.get((kind, name))
        if not found:
            raise self._missing(kind, name)
        if len(found) > 1:
            raise DuplicatePluginError(self._duplicate_text(kind, name))
        return found[0][0]

    def provider(self, kind: str, name: str) -> Provider:
        """The distribution, with its version, that provides this plugin. Raises as `get` does."""
        self.get(kind, name)
        return self._found[kind, name][0][2]

    def descriptors(self, kind: str) -> list[Descriptor]:
        """All usable plugins of this kind by name: without those that two packages provide."""
        return [self._found[kind, name][0][0] for name in self.names(kind) if len(self._found[kind, name]) == 1]

    def models(self) -> list[ModelPlugin]:
        """`descriptors("model")`, with their type."""
        return [cast(ModelPlugin, descriptor) for descriptor in self.descriptors("model")]

    def preferred(self, kind: str) -> list[Descriptor]:
        """Built-ins of this kind in the order in which `auto` tries them: highest preference first, then by name."""
        built_in = [descriptor for descriptor in self.descriptors(kind) if self.provider(kind, descriptor.name).built_in]
        return sorted(built_in, key=lambda descriptor: (-descriptor.preference, descriptor.name))

    def problems(self) -> list[str]:
        """One text for every package that failed to load and every name that two packages provide."""
        duplicates = [self._duplicate_text(kind, name) for (kind, name), found in self._found.items() if len(found) > 1]
        return [str(failure) for failure in self.failures] + duplicates

    def _duplicate_text(self, kind: str, name: str) -> str:
        sources = " and by ".join(source for _, source, _ in self._found[kind, name])
        return f"{kind} {name!r} is provided by {sources}; uninstall one of them, or switch its entry point off with {DISABLE_VARIABLE}"

    def _missing(self, kind: str, name: str) -> UnknownPluginError | PluginLoadError:
        for failure in self.failures:
            if failure.entry.name == name:
                return PluginLoadError(f"{kind} {name!r} cannot be used, its package failed to load: {failure}")
        known = self.names(kind)
        text = f"no {kind} plugin {name!r} is installed{did_you_mean(name, known)}; installed are: {', '.join(known) or 'none'}"
        if self.failures:
            text += "\nThese plugin packages failed to load:" + "".join(f"\n  - {failure}" for failure in self.failures)
        if self.switched_off:
            text += f"\nSwitched off by the environment: {', '.join(str(entry) for entry in self.switched_off)}"
        return UnknownPluginError(text)


def _switched_off(entries: list[Entry], environ: Mapping[str, str]) -> list[Entry]:
    names = {name.strip() for name in environ.get(DISABLE_VARIABLE, "").split(",")} - {""}
    known = {entry.name for entry in entries}
    if unknown := sorted(names - known):
        raise InvalidOptionsError(
            f"{DISABLE_VARIABLE} names {unknown[0]!r}, but no installed entry point is called that{did_you_mean(unknown[0], known)}; "
            f"installed are: {', '.join(sorted(known)) or 'none'}"
        )
    flag = environ.get(BUILT_INS_ONLY_VARIABLE, "0")
    if flag not in ("", "0", "1"):
        raise InvalidOptionsError(f"{BUILT_INS_ONLY_VARIABLE} must be 1 (no third-party plugins) or 0, not {flag!r}")
    return [entry for entry in entries if entry.name in names or (flag == "1" and not entry.provider.built_in)]
