"""`ModelSource`: a model's files on disk, whatever they were before, and how such a folder is read.

Must not know: the network, the cache's layout, torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelSourceError
from octavo.core.sources.checks import check_tokenizer, check_weights, read_json


@dataclass(frozen=True)
class ModelSource:
    """A checked folder with `config.json`, `*.safetensors` and `tokenizer.json`, ready to be loaded."""

    name: str  # what the user asked for
    path: Path
    origin: str  # one phrase for the log: which source was taken, and what its weights are
    revision: str  # commit of the hub, sha256 of a GGUF file, or "local"
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]  # empty where the folder has none


def read_folder(folder: Path, *, name: str, origin: str, revision: str, trust_remote_code: bool = False) -> ModelSource:
    """Check `folder` and read its configs. `{dtype}` in `origin` becomes the weights' dtype, as `bf16`.

    Raises `ModelSourceError` where a file is missing, damaged, pickled, or asks for remote code.
    """
    if not (folder / "config.json").is_file():
        raise ModelSourceError(
            f"{folder} has no config.json, so it is no Hugging Face model folder. "
            "Give a folder that `save_pretrained` wrote, or a .gguf file."
        )
    config = read_json(folder / "config.json")
    check_config(config, where=str(folder / "config.json"), trust_remote_code=trust_remote_code)
    dtype = check_weights(folder)
    check_tokenizer(folder)
    generation = folder / "generation_config.json"
    return ModelSource(
        name=name,
        path=folder,
        origin=origin.replace("{dtype}", dtype),
        revision=revision,
        config=config,
        generation_config=read_json(generation) if generation.is_file() else {},
    )


def check_config(config: Mapping[str, Any], *, where: str, trust_remote_code: bool) -> None:
    """Refuse a config that wants to run Python code which came with the model, unless the user allowed it."""
    if "auto_map" in config and not trust_remote_code:
        raise ModelSourceError(
            f"{where} asks to run the model's own Python code (`auto_map`), which is off by default. "
            "Read that code, then set model.trust_remote_code = true if you trust it."
        )
