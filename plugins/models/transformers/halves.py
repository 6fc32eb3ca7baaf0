"""A causal language model of the library in two halves that are run apart: its decoder, and whatever it does behind it.

`lm_head(hidden)` alone is wrong where a model scales or caps its logits (Gemma 2, Granite, Cohere). So for logits the model's own
forward runs, in which the decoder returns hidden states that it is handed instead of computing any. They travel as the keyword
argument `octavo_hidden`, as `octavo_attend` does: nothing global, so that models and threads do not meet.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from octavo.plugins.models.transformers.config import Unsupported


class Halves:
    """A model whose decoder is known once `whole` has run. Its forward still computes what it did. Symbols: T tokens, R rows."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._decoder: Any = None
        self._output: Any = None  # the class of what the decoder returns: some models read more of it than hidden states

    def whole(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        """The model as it is: ids [T], positions [T] -> logits [T, V].

        The first of its parts that is handed `octavo_attend` is the decoder: `get_decoder` doesn't name the right one of every model.
        Raises Unsupported if there is none.
        """
        handed: list[torch.nn.Module] = []

        def look(part: torch.nn.Module, inputs: Any, arguments: dict[str, Any]) -> None:
            if "octavo_attend" in arguments:
                handed.append(part)

        hooks = [part.register_forward_pre_hook(look, with_kwargs=True) for part in self.model.modules() if part is not self.model]
        try:
            logits: torch.Tensor = self.model(**_arguments(input_ids, positions, attend)).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        if not handed:
            raise Unsupported("it does not hand keyword arguments on to a decoder")
        self._decoder = handed[0]
        self._decoder.forward = self._or_handed(self._decoder.forward)
        return logits

    def _or_handed(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def decode(*inputs: Any, octavo_hidden: torch.Tensor | None = None, **arguments: Any) -> Any:
            if octavo_hidden is not None:
                return self._output(last_hidden_state=octavo_hidden)
            output = forward(*inputs, **arguments)
            self._output = type(output)
            return output

        return decode

    def hidden(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        """The first half: -> hidden states [T, hidden]."""
        states: torch.Tensor = self._decoder(**_arguments(input_ids, positions, attend)).last_hidden_state[0]
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The second half: rows of hidden states [R, hidden] -> logits [R, V]."""
        logits: torch.Tensor = self.model(use_cache=False, octavo_hidden=hidden[None]).logits[0]
        return logits


def _arguments(input_ids: torch.Tensor, positions: torch.Tensor, attend: Any) -> dict[str, Any]:
    return {
        "input_ids": input_ids[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "use_cache": False,
        "octavo_attend": attend,
    }
