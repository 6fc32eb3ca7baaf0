"""Resident memory of a process on a CPU, stage by stage: what it has beyond the weights and the part of the KV pool that was written.

    python -m octavo.bench.resident [--model SOURCE] [--dtype bfloat16] [--requests 64]

Weights are counted, the pool's pages are asked for (mincore(2)), the rest is the difference: interpreter, libraries, tokenizer,
activations, and what the allocator keeps for later. Linux alone. Must not know: plugins.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from octavo.core.assembly import BuiltEngine
from octavo.core.sampling_params import SamplingParams
from octavo.core.torch_runner import TorchRunner
from octavo.llm import LLM

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes."""

    stage: str
    total: int
    weights: int
    pool: int  # pages of the KV pool that were written

    @property
    def beyond(self) -> int:
        """What is neither."""
        return self.total - self.weights - self.pool


def pages_of(tensor: torch.Tensor) -> int:
    """Resident bytes of the pages that a tensor lies on. Raises OSError."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - start
    found = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_void_p(found.ctypes.data)):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return int((found & 1).sum()) * mmap.PAGESIZE


def look(stage: str, built: BuiltEngine | None = None) -> Resident:
    """At this process now."""
    weights = pool = 0
    if built is not None and isinstance(built.engine.runner, TorchRunner):
        weights = built.loaded.model.weight_bytes()
        pool = sum(pages_of(tensor) for layer in built.engine.runner.tensors.device for tensor in layer)
    return Resident(stage, psutil.Process().memory_info().rss, weights, pool)


def stages(model: str, *, dtype: str, requests: int, max_tokens: int = 32) -> Iterator[Resident]:
    """Before a model is there, with it, after greedy requests of 16 to 256 tokens, and after the same sampled."""
    yield look("imported")
    with LLM(model, dtype=dtype, device="cpu", max_model_len=512, max_num_seqs=requests) as llm:
        yield look("loaded", llm.built)
        draw, vocab_size = random.Random(0), llm.engine.vocab_size
        prompts = [{"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(draw.randint(16, 256))]} for _ in range(requests)]
        for stage, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            params = SamplingParams(temperature=temperature, top_p=0.9 if temperature else 1.0, max_tokens=max_tokens, ignore_eos=True)
            llm.generate(prompts, params, use_tqdm=False)
            yield look(f"{requests} {stage}", llm.built)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.resident", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    args = parser.parse_args(argv)
    print(f"{'MiB':<14}{'resident':>10}{'weights':>10}{'KV pool':>10}{'beyond':>10}")
    for found in stages(args.model, dtype=args.dtype, requests=args.requests):
        print(f"{found.stage:<14}" + "".join(f"{size / MIB:>10.0f}" for size in (found.total, found.weights, found.pool, found.beyond)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
