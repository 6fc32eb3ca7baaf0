"""Compiles `triton_paged` for a GPU that need not be there, and prints what its binaries hold: one JSON object a line.

A program of its own, for the interpreter must be off while Triton is imported:

    TRITON_INTERPRET=0 python tests/plugins/kernels/triton_compile.py cuda:90 bfloat16 64,128

prints registers, spilled registers, bytes of shared memory and matrix instructions of each function; for CUDA as `cuobjdump` and
`nvdisasm` find them in the cubin, for AMD from the metadata that the assembler writes into the code object.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.core.attention import AttentionMetadata, LayerSpec
from octavo.plugins.kernels.triton_paged.attention_jit import attend_tiles, write_slots
from octavo.plugins.kernels.triton_paged.kernel import (
    COMPILER_OPTIONS,
    TritonPagedKernel,
    attend_arguments,
    compiler_options,
    tile_for,
    write_arguments,
)

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64"}
_CUDA_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def source(function: Any, arguments: dict[str, Any]) -> ASTSource:
    """What a launch with these arguments compiles: the types, the constants, and what is a multiple of 16."""
    signature, constants, divisible = {}, {}, {}
    for parameter in function.params:
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_TYPES[value.dtype]}"
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        exempt = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if aligned and not exempt and signature[parameter.name] != "constexpr":
            divisible[(parameter.num,)] = [["tt.divisibility", 16]]
    return ASTSource(function, signature, constants, divisible)


def sources(dtype: torch.dtype, size: int) -> Iterator[tuple[str, ASTSource, dict[str, Any]]]:
    """(name, source, compiler's options) of the functions that serve a model of 32 heads in 8 groups, blocks of 16."""
    layer = LayerSpec(index=0, num_heads=32, num_kv_heads=8, head_size_k=size, head_size_v=size, scale=size**-0.5)
    q, output = (torch.empty(2, 32, size, dtype=dtype) for _ in range(2))
    k, v = (torch.empty(2, 8, size, dtype=dtype) for _ in range(2))
    cache = tuple(torch.empty(64, 8, size, dtype=dtype) for _ in range(2))
    for decoding in (True, False):
        meta = AttentionMetadata(
            query_start=torch.zeros(3, dtype=torch.int32),
            seq_lens=torch.zeros(2, dtype=torch.int32),
            slots=torch.zeros(2, dtype=torch.int64),
            max_query_len=1 if decoding else 9,
            max_seq_len=9,
            block_table=torch.zeros(2, 4, dtype=torch.int32),
            block_size=16,
        )
        step = TritonPagedKernel([layer], dtype=dtype, device=torch.device("cpu")).prepare(meta)
        tile = tile_for(layer, dtype, decoding=decoding)
        arguments = attend_arguments(q, cache, output, meta, step, layer, tile=tile, upcast=False)
        yield "attend_tiles, decoding" if decoding else "attend_tiles", source(attend_tiles, arguments), compiler_options(tile)
    yield "write_slots", source(write_slots, write_arguments(cache, k, v, meta)), COMPILER_OPTIONS


def cuda_resources(kernel: Any) -> dict[str, Any]:
    """From the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([_CUDA_TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "--print-code"))
        )
    found = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return {
        "registers": int(found["REG"]),
        "spills": len(re.findall(r"\bSTL\b", code)),  # stores to local memory
        "stack": int(found["STACK"]),
        "matrix": sorted(set(re.findall(r"\bHG?MMA\.[\w.]+", code))),
    }


def hip_resources(kernel: Any) -> dict[str, Any]:
    """From the metadata that becomes the code object's note."""
    code = kernel.asm["amdgcn"]
    found = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+):\s+(\d+)$", code, re.MULTILINE)}
    return {
        "registers": found["vgpr_count"],
        "spills": found["vgpr_spill_count"] + found["sgpr_spill_count"],
        "stack": found["private_segment_fixed_size"],
        "matrix": sorted(set(re.findall(r"\bv_mfma_\w+", code))),
    }


def main(target: str, dtype: str, sizes: str) -> None:
    for size in map(int, sizes.split(",")):
        for name, made, options in sources(getattr(torch, dtype), size):
            kernel = triton.compile(made, target=TARGETS[target], options=options)
            resources = cuda_resources(kernel) if target.startswith("cuda") else hip_resources(kernel)
            row = {"target": target, "dtype": dtype, "size": size, "function": name, "shared": kernel.metadata.shared, **resources}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
