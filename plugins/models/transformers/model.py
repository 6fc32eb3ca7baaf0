"""Loads a model of the transformers library and runs it over the flattened batch.

Symbols: T tokens of a step, R of them whose logits are wanted, V vocabulary. Must not know: kernels, caches, requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.core.attention import LayerSpec
from octavo.core.descriptors import ModelShape
from octavo.core.errors import ModelSourceError
from octavo.core.model import Attend, Model
from octavo.plugins.models.transformers.attention import PROBE, STEP
from octavo.plugins.models.transformers.config import Unsupported
from octavo.plugins.models.transformers.halves import Halves
from octavo.plugins.models.transformers.probe import probe


class TransformersModel(Model):
    """A causal language model of the library: see `octavo.core.model.Model`."""

    def __init__(
        self, halves: Halves, shape: ModelShape, layers: tuple[LayerSpec, ...], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = replace(shape, num_parameters=sum(parameter.numel() for parameter in halves.model.parameters()))
        self.layers = layers
        self.dtype = dtype
        self.device = device
        self._halves = halves

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, *, rows: torch.Tensor) -> torch.Tensor:
        return self._halves.hidden(input_ids, positions, attend)[rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._halves.logits(hidden)

    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in chain(self._halves.model.parameters(), self._halves.model.buffers()))


def load(shape: ModelShape, folder: Path, *, dtype: torch.dtype, device: torch.device) -> TransformersModel:
    """Load the safetensors in `folder` as `dtype` on `device` and probe the model. Raises Unsupported, ModelSourceError."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    model_class = _model_class(config, shape)
    with _quiet():
        model = _from_folder(model_class, config, folder, dtype)
    model.config.pad_token_id = None  # else the library looks in each step for padding, of which there is none
    model.requires_grad_(False).eval().to(device)
    try:
        model.set_attn_implementation(PROBE)
        halves = Halves(model)
        layers = probe(halves, shape, dtype=dtype, device=device)
    except Unsupported as why:
        raise Unsupported(f"{shape.architecture}: {why}") from why.__cause__
    model.set_attn_implementation(STEP)
    return TransformersModel(halves, shape, layers, dtype=dtype, device=device)


def _model_class(config: Any, shape: ModelShape) -> Any:
    """The library's class for that config, if it says of itself that its attention can be replaced."""
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise Unsupported(f"{shape.architecture}: transformers has no causal language model for {type(config).__name__}")
    model_class: Any = mapping[type(config)]
    if model_class._is_stateful:
        raise Unsupported(f"{shape.architecture} carries a state from token to token beside the KV cache")
    if not (model_class._supports_attention_backend and model_class._can_set_attn_implementation()):
        raise Unsupported(f"{shape.architecture} does not hand its attention to the library's AttentionInterface")
    return model_class


def _from_folder(model_class: Any, config: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The model with all its weights: the library would fill in random ones for what is missing."""
    try:
        model, report = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # reported with the others below
            output_loading_info=True,
        )
    except Exception as error:  # OSError, RuntimeError, SafetensorError, ...: whatever reading these files raises
        raise ModelSourceError(f"cannot read the weights in {folder}: {type(error).__name__}: {error}") from error
    wrong = [f"missing: {name}" for name in sorted(report["missing_keys"])]
    wrong += [f"unexpected: {name}" for name in sorted(report["unexpected_keys"])]
    wrong += [
        f"shape of {name}: {list(found)}, config.json asks for {list(asked)}" for name, found, asked in sorted(report["mismatched_keys"])
    ]
    if wrong:
        shown = "".join(f"\n  - {line}" for line in wrong[:20]) + (f"\n  - and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise ModelSourceError(f"the weights in {folder} do not fit its config.json:{shown}")
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no table of wrong weights from the library: what matters is raised."""
    logging: Any = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
