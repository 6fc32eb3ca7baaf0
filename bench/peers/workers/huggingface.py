"""Hugging Face's `generate`: static batches with padding on the left, each as long as its longest answer."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from .loop import Engine, TokenIds


class HuggingFaceEngine(Engine):
    """`AutoModelForCausalLM` with its defaults, in bf16."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options["dtype"]))
        self._model.generation_config = GenerationConfig()  # nothing of the model's own: greedy, past EOS

    def facts(self) -> dict[str, Any]:
        import torch

        return {"versions": {name: version(name) for name in ("transformers", "torch")}, "threads": torch.get_num_threads()}

    def generate(self, prompts: TokenIds, lengths: list[int]) -> TokenIds:
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        most = max(lengths)
        with torch.inference_mode():
            made = self._model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
        return [row[:length] for row, length in zip(made[:, width:].tolist(), lengths, strict=True)]


ENGINE = HuggingFaceEngine
