"""Engines for cells: each is built anew, around a model that is loaded once for all cells that can share it.

Must not know: workloads, what the engines are used for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from octavo.bench.memory_table import MemoryMeter
from octavo.core.assembly import BuiltEngine, LoadedModel, build_engine, load_model
from octavo.core.clock import Clock
from octavo.core.devices import give_back_memory
from octavo.core.registry import Registry
from octavo.core.settings.config import EngineConfig
from octavo.core.stack import Choice

logger = logging.getLogger("octavo")


class Engines:
    """Builds engines. `report` gets the lines that loading a model logs; building an engine is silent."""

    def __init__(self, registry: Registry, *, report: Callable[[str], None] = logger.info, clock: Clock | None = None) -> None:
        self.registry = registry
        self._report = report
        self._clock = clock
        self._models: dict[tuple[object, ...], LoadedModel] = {}
        self._meters: dict[int, MemoryMeter] = {}

    def loaded(self, config: EngineConfig) -> LoadedModel:
        """The model as this config wants it; loaded once for all that want the same of it. Raises as `load_model`."""
        engine = config.engine
        key = (config.source, config.revision, _key(config.model), _key(config.ops), engine.dtype, engine.kv_dtype, engine.device)
        if key not in self._models:
            source = next((model.source for model in self._models.values() if model.source.name == config.source), None)
            loaded = self._models[key] = load_model(self.registry, config, source=source, report=self._report)
            self._meters[id(loaded)] = MemoryMeter(loaded.model, beside=partial(self._beside, loaded))
        return self._models[key]

    def _beside(self, one: LoadedModel) -> int:
        """Bytes of the weights of all other models on its device, as of now: more may be loaded between two runs, as the reference is."""
        others = [loaded.model for loaded in self._models.values() if loaded is not one]
        return sum(model.weight_bytes() for model in others if model.device == one.model.device)

    def meter(self, config: EngineConfig) -> MemoryMeter:
        """Of the memory that the model and what runs on it take; made when the model was loaded."""
        return self._meters[id(self.loaded(config))]

    @contextmanager
    def open(self, config: EngineConfig) -> Iterator[BuiltEngine]:
        """A fresh engine. When its block is left it is closed, and what it freed given back. Raises as `build_engine`."""
        built = build_engine(self.registry, config, self.loaded(config), clock=self._clock, report=logger.debug)
        try:
            yield built
        finally:
            built.engine.close()
            give_back_memory()

    def reference(self, config: EngineConfig, *, max_model_len: int) -> EngineConfig:
        """One request at a time in fp32 with the naive kernel, for the model and device of `config`; its pool holds one context."""
        plugins = {"kernel": "naive", "scheduler": "chunked", "allocator": "paged", "ops": "torch"}
        choices = {kind: Choice.default(self.registry.get(kind, name)) for kind, name in plugins.items()}
        scheduler = choices["scheduler"]
        options = scheduler.options.model_copy(update={"max_num_seqs": 1})
        limit = self.loaded(config).shape.max_position_embeddings
        length = min(max_model_len + 1, limit)  # a token more, so that a full context's last token can be scored
        engine = config.engine.model_copy(
            update={
                "dtype": "float32",
                "kv_dtype": "auto",
                "max_model_len": length,
                "num_kv_slots": length + 16,
                "kv_cache_memory": None,
                "speculative_config": None,
                "swap_space": 0.0,
            }
        )
        return replace(
            config,
            engine=engine,
            scheduler=Choice(scheduler.plugin, options),
            allocator=choices["allocator"],
            kernel=choices["kernel"],
            ops=choices["ops"],
        )


def _key(choice: Choice | None) -> object:
    return None if choice is None else (choice.name, choice.options.model_dump_json())
