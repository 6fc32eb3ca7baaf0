"""The second half of configuration, once model and device are known: decide `auto`, fill in lengths and budgets, check the stack.

Must not know: torch, where settings came from, names of plugins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

from octavo.core.compat import EXCHANGEABLE, problems, raise_if_incompatible
from octavo.core.descriptors import Facts, ModelPlugin, ModelShape, SchedulerPlugin
from octavo.core.errors import IncompatibleStackError, InvalidOptionsError
from octavo.core.options import SchedulerOptions
from octavo.core.registry import Registry
from octavo.core.settings.config import EngineConfig
from octavo.core.settings.engine import EngineSettings
from octavo.core.stack import Choice, Stack

CHUNKED_BUDGET = 2048  # tokens a step, where a scheduler cuts prompts and nobody says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Everything decided: ready to be built."""

    source: str
    stack: Stack
    engine: EngineSettings  # as configured; see `max_model_len` below
    facts: Facts
    max_model_len: int

    @property
    def scheduler_options(self) -> SchedulerOptions:
        return cast(SchedulerOptions, self.stack.scheduler.options)


def choose_model(registry: Registry, chosen: Choice | None, config: Mapping[str, Any]) -> Choice:
    """The model plugin for a checkpoint with this Hugging Face config.json: the chosen one, else the first built-in that accepts it.

    Raises `IncompatibleStackError` with the reason of each plugin that was asked.
    """
    if chosen is not None:
        reason = cast(ModelPlugin, chosen.plugin).accepts(config)
        if reason is None:
            return chosen
        others = [f'"{model.name}"' for model in registry.models() if model.accepts(config) is None]
        fix = f"; set model.plugin = {' or '.join(others)}" if others else "; no installed model plugin does"
        raise IncompatibleStackError(f"{chosen} does not accept this model: {reason}{fix}")
    for plugin in registry.preferred("model"):
        if cast(ModelPlugin, plugin).accepts(config) is None:
            return Choice.default(plugin)
    reasons = {model.name: model.accepts(config) for model in registry.models()}
    architecture = ", ".join(config.get("architectures") or ["without a name"])
    lines = [f"no built-in model plugin accepts this model (architecture: {architecture}):"]
    lines += [f"  - {name}: {reason}" for name, reason in reasons.items() if reason is not None]
    lines += [
        f'  - {name} of {registry.provider("model", name)} accepts it: set model.plugin = "{name}"'
        for name, reason in reasons.items()
        if reason is None
    ]
    raise IncompatibleStackError("\n".join(lines))


def resolve_dtypes(settings: EngineSettings, checkpoint: str, native: Collection[str]) -> tuple[str, str]:
    """(dtype, kv_dtype). `auto` is the checkpoint's type where it is among `native`, what the device has instructions for, else float32."""
    automatic = checkpoint if checkpoint in native else "float32"
    dtype = automatic if settings.dtype == "auto" else settings.dtype
    return dtype, dtype if settings.kv_dtype == "auto" else settings.kv_dtype


def resolve(registry: Registry, config: EngineConfig, *, model: Choice, shape: ModelShape, facts: Facts) -> ResolvedConfig:
    """Decide what was left open and check the result.

    Raises `IncompatibleStackError` where the parts don't work together, `InvalidOptionsError` where the numbers don't.
    """
    max_model_len = _max_model_len(config.engine, shape)
    scheduler = _with_budget(registry, config.scheduler, max_model_len)
    stack = _with_automatic_parts(registry, replace(config, model=model, scheduler=scheduler), facts)
    raise_if_incompatible(stack, facts, registry)
    return ResolvedConfig(source=config.source, stack=stack, engine=config.engine, facts=facts, max_model_len=max_model_len)


def passed_over(registry: Registry, config: EngineConfig, stack: Stack, facts: Facts) -> list[str]:
    """A sentence for each reason why `auto` did not take plugins for this device that it prefers to those of `stack`."""
    refused: dict[str, list[str]] = {}
    for kind in EXCHANGEABLE:
        if getattr(config, kind) is not None:
            continue
        for choice in _candidates(registry, kind):
            if choice.name == stack.names[kind]:
                break
            if facts.provides.issuperset(word for word in choice.plugin.needs(choice.options, facts) if word.startswith("device:")):
                for reason in (*choice.plugin.rejects(choice.options, facts), *choice.plugin.avoids(choice.options, facts)):
                    refused.setdefault(reason, []).append(f"{choice} (it takes {stack.names[kind]!r})")
    return [f"auto goes without {' and '.join(names)}: {reason}" for reason, names in refused.items()]


def _max_model_len(engine: EngineSettings, shape: ModelShape) -> int:
    asked, allowed = engine.max_model_len, shape.max_position_embeddings
    if asked is not None and asked > allowed:
        raise InvalidOptionsError(f"engine.max_model_len: {asked} is more than the {allowed} positions of the model; set at most {allowed}")
    return asked or allowed


def _with_budget(registry: Registry, scheduler: Choice, max_model_len: int) -> Choice:
    plugin, options = cast(SchedulerPlugin, scheduler.plugin), cast(SchedulerOptions, scheduler.options)
    budget, seqs = options.max_num_batched_tokens, options.max_num_seqs
    if budget is None:
        budget = max(seqs, CHUNKED_BUDGET if plugin.chunking else max_model_len)
        return Choice(plugin, options.model_copy(update={"max_num_batched_tokens": budget}))
    where = f"scheduler.{plugin.name}.max_num_batched_tokens"
    if budget < seqs:
        raise InvalidOptionsError(
            f"{where}: {budget} is less than max_num_seqs = {seqs}, but a step must hold one token of each sequence; "
            f"raise it to at least {seqs} or lower max_num_seqs to {budget}"
        )
    if not plugin.chunking and budget < max_model_len:
        cutting = [f'"{other.name}"' for other in registry.descriptors("scheduler") if cast(SchedulerPlugin, other).chunking]
        choice = f", or choose a scheduler that cuts prompts ({', '.join(cutting)})" if cutting else ""
        raise InvalidOptionsError(
            f"{where}: {budget} is less than max_model_len = {max_model_len}, but {scheduler} runs prompts whole; "
            f"raise it to at least {max_model_len}, lower max_model_len to {budget}{choice}"
        )
    return scheduler


def _with_automatic_parts(registry: Registry, config: EngineConfig, facts: Facts) -> Stack:
    """Decide `auto`: the first working combination of built-ins by preference, the kernel's first; the favourites where none works."""
    named = {kind: cast("Choice | None", getattr(config, kind)) for kind in ("model", *EXCHANGEABLE)}
    candidates = {kind: [choice] if choice else _candidates(registry, kind) for kind, choice in named.items()}
    for kind, choices in candidates.items():  # what had better not be taken comes last
        candidates[kind] = sorted(choices, key=lambda choice: len(choices) > 1 and any(choice.plugin.avoids(choice.options, facts)))
    combinations = [Stack(**dict(zip(candidates, parts, strict=True))) for parts in product(*candidates.values())]
    return min(combinations, key=lambda stack: len(problems(stack, facts)))  # the first of equals: the favourites


def _candidates(registry: Registry, kind: str) -> list[Choice]:
    found = [Choice.default(plugin) for plugin in registry.preferred(kind)]
    if not found:
        installed = ", ".join(registry.names(kind)) or "none"
        raise IncompatibleStackError(f"auto finds no built-in {kind} plugin; set {kind}.plugin to an installed one ({installed})")
    return found
