"""Config, plugins and model files become a running engine.

In two steps, so that several stacks can share one loaded model: `load_model`, then `build_engine` as often as wanted.
Must not know: any plugin by name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from octavo.core.attention import Kernel
from octavo.core.clock import Clock, MonotonicClock
from octavo.core.default_sampling import default_params, describe_defaults, read_defaults
from octavo.core.descriptors import AllocatorPlugin, Facts, ModelPlugin, ModelShape, PoolShape, SchedulerPlugin
from octavo.core.devices import capability, choose_device, describe_device, device_memory, give_back_memory, measure_reserved, native_dtypes
from octavo.core.engine import Engine
from octavo.core.errors import ConfigError, ModelSourceError, OctavoError, PluginContractError
from octavo.core.kv import Allocator
from octavo.core.memory import GIB, PoolSize, size_pool
from octavo.core.model import Model, Ops
from octavo.core.plan_builder import Proposer
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduling import Scheduler
from octavo.core.settings.config import EngineConfig, load_config
from octavo.core.settings.engine import SpeculativeConfig
from octavo.core.settings.flat import from_flat
from octavo.core.settings.resolve import ResolvedConfig, choose_model, passed_over, resolve, resolve_dtypes
from octavo.core.sources import ModelSource, resolve as resolve_source
from octavo.core.speculation import PromptLookup
from octavo.core.stack import Choice
from octavo.core.text.tokenizer import Tokenizer
from octavo.core.threads import choose_threads
from octavo.core.torch_runner import TorchRunner

logger = logging.getLogger("octavo")


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model on a device, with what was decided before it could be loaded."""

    source: ModelSource
    choice: Choice
    shape: ModelShape
    facts: Facts
    ops: Choice
    model: Model
    tokenizer: Tokenizer | None  # None: the folder has none, and prompts are token ids


@dataclass(frozen=True, kw_only=True, eq=False)
class BuiltEngine:
    """An engine and how it came about."""

    engine: Engine
    config: ResolvedConfig
    pool: PoolSize
    loaded: LoadedModel
    num_threads: int  # that compute on the CPU
    default_sampling: Mapping[str, Any]  # fields of SamplingParams that the model's files set, for calls without params

    def default_params(self, prompt_len: int, *, max_tokens: int | None) -> SamplingParams:
        """For a call without params and a prompt of that length; `max_tokens`: where the model's files do not say it."""
        return default_params(self.default_sampling, prompt_len=prompt_len, max_model_len=self.config.max_model_len, max_tokens=max_tokens)


def open_engine(model: str | os.PathLike[str] | None = None, *, config: str | Path | None = None, **settings: Any) -> BuiltEngine:
    """An engine from what a user writes: a model's name, a config file, and settings under their flat names, which override it.

    Raises ConfigError and its children, ModelSourceError.
    """
    registry = Registry.discover()
    overrides = from_flat(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **settings)
    checked = load_config(registry, file=config, overrides=overrides)
    return build_engine(registry, checked, load_model(registry, checked))


def load_model(
    registry: Registry, config: EngineConfig, *, source: ModelSource | None = None, report: Callable[[str], None] = logger.info
) -> LoadedModel:
    """Find the model's files (unless given), decide what the config left open, check the stack, then load the weights.

    Raises ModelSourceError, ConfigError and its children; nothing large is loaded before the stack is known to run.
    """
    torch.set_num_threads(choose_threads(config.engine.num_threads))
    source = source or resolve_source(config.source, revision=config.revision, trust_remote_code=config.trust_remote_code, report=report)
    with _reading(source.path / "config.json"):
        choice = choose_model(registry, config.model, source.config)
        shape = cast(ModelPlugin, choice.plugin).describe(source.config)
    device = choose_device(config.engine.device)
    dtype, kv_dtype = resolve_dtypes(config.engine, shape.dtype, native_dtypes(device))
    facts = shape.facts(device=str(device), dtype=dtype, kv_dtype=kv_dtype, capability=capability(device))
    stack = resolve(registry, config, model=choice, shape=shape, facts=facts).stack
    for sentence in passed_over(registry, config, stack, facts):
        logger.warning("%s", sentence)
    with _reading(source.path / "tokenizer_config.json"):
        tokenizer = Tokenizer.from_folder(source.path) if (source.path / "tokenizer.json").exists() else None
    ops = _build(stack.ops, Ops, stack.ops.options, facts)
    model = _build(choice, Model, source, choice.options, ops, dtype=getattr(torch, dtype), device=device)
    give_back_memory()
    report(f"weights: {model.weight_bytes() / GIB:.2f} GiB in {dtype} on {describe_device(device)}")
    return LoadedModel(
        source=source,
        choice=choice,
        shape=shape,
        facts=facts,
        ops=stack.ops,
        model=model,
        tokenizer=tokenizer,
    )


def build_engine(
    registry: Registry,
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    clock: Clock | None = None,
    report: Callable[[str], None] = logger.info,
) -> BuiltEngine:
    """Build kernel, pool, allocator, scheduler and runner around a loaded model, as the config says.

    Raises IncompatibleStackError, or ConfigError if the pool cannot hold one request of `max_model_len`.
    """
    clock = clock or MonotonicClock()
    num_threads = choose_threads(config.engine.num_threads)
    torch.set_num_threads(num_threads)
    facts, model, settings = loaded.facts, loaded.model, config.engine
    resolved = resolve(registry, config, model=loaded.choice, shape=loaded.shape, facts=facts)
    stack, options, max_model_len = resolved.stack, resolved.scheduler_options, resolved.max_model_len
    on_gpu = facts.device_type != "cpu"
    budget = options.max_num_batched_tokens or max_model_len
    drafts = settings.speculative_config.num_speculative_tokens if settings.speculative_config else 0
    kernel = _build(stack.kernel, Kernel, stack.kernel.options, model.layers, facts)
    pool = size_pool(
        slot_bytes=sum(spec.bytes_per_slot for layer in model.layers for spec in kernel.cache_spec(layer)),
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        device=device_memory(model.device),
        on_gpu=on_gpu,
        reserved_bytes=measure_reserved(model, num_tokens=budget, num_rows=options.max_num_seqs * (1 + drafts)) if on_gpu else 0,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory=settings.kv_cache_memory,
        num_kv_slots=settings.num_kv_slots,
        swap_space=settings.swap_space,
        host_total=device_memory(torch.device("cpu")).total,
    )
    shape = PoolShape(
        num_slots=pool.num_slots,
        num_host_slots=pool.num_host_slots,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
    )
    kv = _build(stack.allocator, Allocator, stack.allocator.options, shape)
    if kv.layout != cast(AllocatorPlugin, stack.allocator.plugin).layout:
        raise PluginContractError(f"{stack.allocator} was declared with another layout than the {kv.layout!r} that it has")
    pool = pool.divided(kv.capacity, num_host_slots=kv.host_capacity, block_size=kv.block_size)
    pool.check(max_model_len)
    scheduler = _build(stack.scheduler, Scheduler, options, kv)
    if scheduler.chunking != cast(SchedulerPlugin, stack.scheduler.plugin).chunking:
        raise PluginContractError(f"{stack.scheduler} was declared with chunking = {not scheduler.chunking}, and has it otherwise")
    if settings.speculative_config is not None:
        scheduler.proposer = _proposer(settings.speculative_config)
        report(f"speculation: {settings.speculative_config.method}, up to {drafts} tokens a sequence and step")
    try:
        runner = TorchRunner(model, kernel, kv, clock=clock, max_rows=options.max_num_seqs, debug=settings.debug, num_threads=num_threads)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        size = f"{pool.num_bytes / GIB:.2f} GiB ({pool.reason})"
        raise ConfigError(f"the KV pool of {size} cannot be allocated on {facts.device}: make it smaller ({error})") from error
    engine = Engine(
        scheduler=scheduler,
        kv=kv,
        runner=runner,
        max_model_len=max_model_len,
        vocab_size=loaded.shape.vocab_size,
        eos_token_ids=loaded.tokenizer.eos_token_ids if loaded.tokenizer is not None else (),
        tokenizer=loaded.tokenizer,
        clock=clock,
        seed=settings.seed,
        debug=settings.debug,
    )
    for observer in registry.observers:
        engine.observers.add_hooks(observer.hooks)
    engine.observers.tell("engine_started", stack)
    sampling = _default_sampling(config, loaded, report)
    report(f"stack: {stack}")
    if not on_gpu:
        report("gpu_memory_utilization is unused on a CPU")
    if settings.swap_space and options.preemption != "swap":
        report("swap_space is unused: preempted requests are computed again; scheduler.preemption = 'swap' has them kept")
    for line in pool.log_lines(max_model_len):
        report(line)
    return BuiltEngine(engine=engine, config=resolved, pool=pool, loaded=loaded, num_threads=num_threads, default_sampling=sampling)


def _default_sampling(config: EngineConfig, loaded: LoadedModel, report: Callable[[str], None]) -> dict[str, Any]:
    """What the model's files say of sampling, if the settings let them."""
    file, used = str(loaded.source.path / "generation_config.json"), config.engine.generation_config == "auto"
    defaults = read_defaults(loaded.source.generation_config, file=file) if used else {}
    report(describe_defaults(defaults, file=file, used=used))
    return defaults


def _proposer(settings: SpeculativeConfig) -> Proposer:
    """Who guesses next tokens. A draft model would be chosen here."""
    return PromptLookup(num_tokens=settings.num_speculative_tokens, longest=settings.prompt_lookup_max, shortest=settings.prompt_lookup_min)


Part = TypeVar("Part")


def _build(choice: Choice, kind: type[Part], *arguments: Any, **named: Any) -> Part:
    """What the plugin builds. A mistake of the plugin is told as one: PluginContractError."""
    try:
        built = choice.plugin.build(*arguments, **named)
    except (OctavoError, MemoryError):
        raise
    except Exception as error:
        raise PluginContractError(f"{choice} could not be built: {type(error).__name__}: {error}") from error
    if not isinstance(built, kind):
        raise PluginContractError(f"{choice}: build returned {built!r:.60}, which is no {kind.__name__}")
    return built


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """A model's file of valid JSON may hold anything: say which file it is that cannot be used."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise ModelSourceError(f"{file} (or a file beside it) cannot be used: {type(error).__name__}: {error}") from error
