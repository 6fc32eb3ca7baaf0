"""Memory beyond weights and KV pool has a bound, in a process of its own; what is looked at is what is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.bench.resident import MIB, pages_of
from octavo.core.native import absence
from tests.models import tiny

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 576, 1536, 8, 9, 3, 49_152  # SmolLM2-135M with fewer layers
LOOK = (
    "import sys; from octavo.bench.resident import stages\n"
    "for found in stages(sys.argv[1], dtype='bfloat16', requests=64, max_tokens=4): print(found.total, found.weights, found.pool)"
)


def write_model(folder: Path) -> None:
    """Weights of 113 MiB in bf16 that a text makes no sense of."""
    size = HIDDEN // HEADS
    kv = KV_HEADS * size
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj": (rows, HIDDEN) for name, rows in (("q", HIDDEN), ("k", kv), ("v", kv), ("o", HIDDEN))}
        shapes |= {f"{prefix}.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")} | {f"{prefix}.mlp.down_proj": (HIDDEN, INNER)}
        shapes |= {f"{prefix}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    pattern = ((torch.arange(VOCAB * HIDDEN) * 7919 % 1009).float() / 1009 - 0.5).mul_(0.1).bfloat16()
    weights = {f"{name}.weight": pattern[: np.prod(shape)].view(shape).clone() for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(tiny("llama_gqa") / "tokenizer.json", folder)


@pytest.mark.slow
@pytest.mark.skipif(absence() is not None, reason="no native library: torch's linears keep other memory")
def test_beyond_weights_and_pool_is_under_600_mb(tmp_path: Path) -> None:
    """After loading and after 64 requests, greedy and sampled. Loading leaves nothing of the size of the weights behind: what is packed
    replaces the originals."""
    write_model(tmp_path)
    done = subprocess.run([sys.executable, "-c", LOOK, str(tmp_path)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    imported, loaded, *ran = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(ran) == 2 and all(pool > 8 * MIB for _, _, pool in ran) and loaded[1] > 100 * MIB
    assert [stage for stage in (loaded, *ran) if stage[0] - stage[1] - stage[2] >= 600e6] == []
    assert loaded[0] - loaded[1] - loaded[2] - imported[0] < 80 * MIB


def test_pages_that_were_written() -> None:
    """Of 64 MiB that nobody touched there are none; of the half that was written all, and hardly more (pages may be of 2 MiB)."""
    tensor = torch.from_numpy(np.zeros(64 * MIB, dtype=np.uint8))
    assert pages_of(tensor) < 3 * MIB
    tensor[: 32 * MIB] = 1
    assert 32 * MIB <= pages_of(tensor) < 37 * MIB
