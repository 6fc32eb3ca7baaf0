"""Octavo as a peer among peers."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from .loop import Engine, TokenIds


class OctavoEngine(Engine):
    """`octavo.LLM` with its defaults but for what the options say."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from octavo import LLM

        self._llm = LLM(model, **options)

    def facts(self) -> dict[str, Any]:
        from octavo.core.native import absence, load

        built = self._llm.built
        return {
            "versions": {name: version(name) for name in ("octavo", "torch")},
            "threads": built.num_threads,
            "kv_slots": built.pool.num_slots,
            "stack": built.config.stack.names,
            "native level": load().level if absence() is None else "none",
        }

    def generate(self, prompts: TokenIds, lengths: list[int]) -> TokenIds:
        from octavo import SamplingParams

        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        return [list(output.outputs[0].token_ids) for output in self._llm.generate(given, params, use_tqdm=False)]

    def forget(self) -> None:
        self._llm.engine.kv.reset()

    def kv_memory(self) -> Iterable[tuple[int, int]]:
        runner: Any = self._llm.engine.runner
        for layer in runner.tensors.device:
            for tensor in layer:
                yield tensor.data_ptr(), tensor.nbytes


ENGINE = OctavoEngine
