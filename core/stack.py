"""A stack: one chosen plugin of each kind, with its options.

Must not know: the config's text, how a stack is checked or built.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.descriptors import Descriptor
from octavo.core.options import PluginOptions


@dataclass(frozen=True, slots=True)
class Choice:
    """A plugin and the options it is to be built with."""

    plugin: Descriptor
    options: PluginOptions

    @classmethod
    def default(cls, plugin: Descriptor) -> Choice:
        """The plugin with default options; the registry saw to it that they exist."""
        return cls(plugin, plugin.options())

    @property
    def kind(self) -> str:
        return self.plugin.kind

    @property
    def name(self) -> str:
        return self.plugin.name

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The five parts that together make an engine."""

    model: Choice
    scheduler: Choice
    allocator: Choice
    kernel: Choice
    ops: Choice

    @property
    def parts(self) -> tuple[Choice, ...]:
        return (self.scheduler, self.allocator, self.kernel, self.ops, self.model)

    @property
    def names(self) -> dict[str, str]:
        """Kind to plugin name."""
        return {part.kind: part.name for part in self.parts}

    def with_part(self, choice: Choice) -> Stack:
        """The same stack but for one part."""
        return replace(self, **{choice.kind: choice})

    def __str__(self) -> str:
        return " + ".join(part.name for part in self.parts)
