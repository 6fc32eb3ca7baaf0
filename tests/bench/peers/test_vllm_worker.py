"""vLLM's worker leans on what is no interface of vLLM's only where it can do without. With a stand-in for the package."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace as Space
from typing import Any

import pytest
import torch

from octavo.bench.peers.workers import vllm as module
from octavo.bench.peers.workers.vllm import VllmEngine

POOL = torch.zeros(2, 100, 3, 64, dtype=torch.bfloat16)  # of each of 30 layers: K and V of 100 slots


def inner() -> Any:
    """What vLLM has inside, for a model of 30 layers with 3 KV heads of 64."""
    config = Space(num_hidden_layers=30, num_key_value_heads=3, hidden_size=576, num_attention_heads=9)
    runner = Space(kv_caches=[POOL] * 30)
    executor = Space(driver_worker=Space(worker=Space(model_runner=runner)))
    return Space(
        engine_core=Space(engine_core=Space(model_executor=executor)), vllm_config=Space(model_config=Space(hf_text_config=config))
    )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    """Loaded with the stand-in; `_llm` is that."""

    class LLM:
        def __init__(self, **options: Any) -> None:
            self.options, self.llm_engine, self.dropped = options, inner(), True

        def reset_prefix_cache(self) -> bool | None:
            return self.dropped

    package = ModuleType("vllm")
    package.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setattr(module, "_version", lambda: "0.0")
    return VllmEngine("m", {"dtype": "bfloat16"})


def test_facts_of_what_is_known(engine: VllmEngine) -> None:
    """Threads of torch, slots of the pool."""
    assert engine._llm.options == {"model": "m", "dtype": "bfloat16"}
    facts = engine.facts()
    assert facts["threads"] == torch.get_num_threads() and facts["kv_slots"] == 100 and facts["versions"]["vllm"] == "0.0"
    assert engine.kv_memory() == [(POOL.data_ptr(), POOL.nbytes)] * 30


@pytest.mark.parametrize(
    ("path", "pool_known"),
    [
        ("llm_engine", False),
        ("llm_engine.engine_core.engine_core", False),
        ("llm_engine.engine_core.engine_core.model_executor.driver_worker", False),
        ("llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches", False),
        ("llm_engine.vllm_config", True),
        ("llm_engine.vllm_config.model_config.hf_text_config.num_key_value_heads", True),
    ],
)
def test_what_is_not_there_costs_no_row(engine: VllmEngine, path: str, pool_known: bool) -> None:
    """The number of slots is unknown then, and where the pool lies perhaps: nothing fails."""
    *way, last = path.split(".")
    owner = engine._llm
    for name in way:
        owner = getattr(owner, name)
    delattr(owner, last)
    facts = engine.facts()
    assert facts["kv_slots"] == "unknown" and facts["threads"] > 0
    assert (engine.kv_memory() is not None) is pool_known


def test_prefixes_that_stay_are_an_error(engine: VllmEngine) -> None:
    """False says so; None is what older versions return."""
    engine.forget()
    engine._llm.dropped = None
    engine.forget()
    engine._llm.dropped = False
    with pytest.raises(RuntimeError, match="did not drop its cached prefixes"):
        engine.forget()
