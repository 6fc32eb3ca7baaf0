"""Does this stack run on this device with this model, why not, and which single change would mend it.

A set subtraction: what each part needs, minus what all the others provide, plus every part's own refusals. The same functions serve
the engine, `octavo stacks`, the table in the docs and the test matrix. Must not know: names of plugins, torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from octavo.core.capabilities import capability
from octavo.core.descriptors import Facts
from octavo.core.errors import IncompatibleStackError, PluginContractError
from octavo.core.registry import Registry
from octavo.core.stack import Choice, Stack

EXCHANGEABLE = ("scheduler", "allocator", "kernel", "ops")


def problems(stack: Stack, facts: Facts) -> list[str]:
    """Every reason why the stack cannot run; empty: it runs. A part that uses an unknown capability is a `PluginContractError`."""
    found = []
    for part in stack.parts:
        provided = facts.provides.union(*(other.plugin.provides for other in stack.parts if other is not part))
        found += [f"{part} needs {word}, {_who_lacks(word, stack, facts)}" for word in sorted(_needs(part, facts) - provided)]
        found += [f"{part}: {sentence}" for sentence in part.plugin.rejects(part.options, facts)]
    return found


def single_changes(stack: Stack, facts: Facts, registry: Registry) -> list[Choice]:
    """Installed plugins of which each, put in with default options in place of the one there, makes the whole stack run."""
    candidates = (Choice.default(plugin) for kind in EXCHANGEABLE for plugin in registry.descriptors(kind))
    return [other for other in candidates if other.name != stack.names[other.kind] and not problems(stack.with_part(other), facts)]


def explain(reasons: list[str], changes: list[Choice]) -> str:
    """The text that a user sees for a stack that cannot run."""
    lines = ["This stack cannot run:", *(f"  - {reason}" for reason in reasons)]
    lines.append(f"  One change that would make it run: {_alternatives(changes)}" if changes else "  No single change would make it run.")
    return "\n".join(lines)


def raise_if_incompatible(stack: Stack, facts: Facts, registry: Registry) -> None:
    """Raise `IncompatibleStackError` with all problems and the single changes that would mend them, where there are any."""
    if reasons := problems(stack, facts):
        raise IncompatibleStackError(explain(reasons, single_changes(stack, facts, registry)))


def all_stacks(registry: Registry, config: Mapping[str, Any]) -> Iterator[Stack]:
    """Every combination of installed plugins with default options, for the model plugins that accept the Hugging Face `config`."""
    models = [model for model in registry.models() if model.accepts(config) is None]
    for plugins in product(models, *(registry.descriptors(kind) for kind in EXCHANGEABLE)):
        yield Stack(**{plugin.kind: Choice.default(plugin) for plugin in plugins})


@dataclass(frozen=True, slots=True)
class StackReport:
    """One row of the compatibility table."""

    stack: Stack
    problems: tuple[str, ...]
    changes: tuple[Choice, ...]

    @property
    def runs(self) -> bool:
        return not self.problems


def reports(registry: Registry, config: Mapping[str, Any], *, device: str, dtype: str, kv_dtype: str) -> Iterator[StackReport]:
    """Judge every stack of `all_stacks` on that device; facts are those of the model plugin's reading of `config`."""
    shapes = {model.name: model.describe(config) for model in registry.models() if model.accepts(config) is None}
    for stack in all_stacks(registry, config):
        facts = shapes[stack.model.name].facts(device=device, dtype=dtype, kv_dtype=kv_dtype)
        reasons = problems(stack, facts)
        yield StackReport(stack, tuple(reasons), tuple(single_changes(stack, facts, registry)) if reasons else ())


def markdown_table(rows: list[StackReport]) -> str:
    """The compatibility table of the docs."""
    lines = ["| scheduler | allocator | kernel | ops | model | runs | why not |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        names = " | ".join(f"`{part.name}`" for part in row.stack.parts)
        lines.append(f"| {names} | {'yes' if row.runs else 'no'} | {'; '.join(row.problems).replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _needs(part: Choice, facts: Facts) -> frozenset[str]:
    words = part.plugin.implied_needs.union(part.plugin.needs(part.options, facts))
    for word in words:
        try:
            capability(word)
        except PluginContractError as error:
            raise PluginContractError(f"{part} needs an {error}") from None
    return words | facts.needs if part.kind == "model" else words


def _who_lacks(word: str, stack: Stack, facts: Facts) -> str:
    known = capability(word)
    if known is None:
        return "which no other part provides"
    if known.provided_by == "facts":
        family = word.partition(":")[0]
        return f"but {family} is {next(have for have in facts.provides if have.startswith(f'{family}:')).partition(':')[2]}"
    return f"which {known.provided_by} {stack.names[known.provided_by]!r} does not provide"


def _alternatives(changes: list[Choice]) -> str:
    texts = [f'{change.kind} = "{change.name}"' for change in changes]
    return ", or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
