"""llama.cpp through its Python bindings, with a GGUF file as it is. One prompt at a time, as its `generate` has it."""

from __future__ import annotations

from importlib.metadata import version
from itertools import islice
from typing import Any

from .loop import Engine, TokenIds


class LlamaCppEngine(Engine):
    """`llama_cpp.Llama` with its defaults but for what the options say."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from llama_cpp import Llama

        self._llama = Llama(model_path=model, verbose=False, **options)

    def facts(self) -> dict[str, Any]:
        from llama_cpp import llama_print_system_info

        return {
            "versions": {"llama-cpp-python": version("llama-cpp-python")},
            "threads": self._llama.n_threads,
            "built for": llama_print_system_info().decode(),
        }

    def generate(self, prompts: TokenIds, lengths: list[int]) -> TokenIds:
        made = []
        for prompt, length in zip(prompts, lengths, strict=True):
            made.append(list(islice(self._llama.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0), length)))
        return made

    def forget(self) -> None:
        self._llama.reset()


ENGINE = LlamaCppEngine
