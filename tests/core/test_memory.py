"""KV bytes, pool size and the start-up log: the articles' numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from octavo.core.descriptors import ModelShape
from octavo.core.errors import ConfigError
from octavo.core.memory import GIB, DeviceMemory, PoolSize, kv_bytes_per_token, size_pool

LLAMA_8B = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_size_k=128,
    head_size_v=128,
    windows=(None,) * 32,
    vocab_size=128_256,
    max_position_embeddings=131_072,
    num_parameters=8_030_261_248,
    dtype="bfloat16",
)
SLOT = 131_072  # bytes of a token of Llama-3.1-8B in bf16


def pool(*, block_size: int = 16, **given: Any) -> PoolSize:
    """A pool for Llama-3.1-8B on a GPU of 80 GiB in whole blocks, unless told otherwise."""
    defaults: dict[str, Any] = {
        "slot_bytes": SLOT,
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "device": DeviceMemory(total=80 * GIB, available=70 * GIB),
        "on_gpu": True,
    }
    size, unit = size_pool(**{**defaults, **given}), block_size or 1
    return size.divided(size.num_slots // unit * unit, num_host_slots=size.num_host_slots // unit * unit, block_size=block_size)


@pytest.mark.parametrize(("tokens", "expected"), [(1, 131_072), (16, 2 << 20), (2048, 256 << 20), (4096, 512 << 20), (8192, 1 << 30)])
def test_kv_bytes_of_llama_8b(tokens: int, expected: int) -> None:
    """Llama-3.1-8B: 131,072 bytes a token, 2 MiB a block of 16, 256 MiB for 2,048 tokens, 512 MiB for 4,096, 1 GiB for 8,192."""
    assert kv_bytes_per_token(LLAMA_8B, "bfloat16") * tokens == expected


def test_kv_bytes_of_llama_3b() -> None:
    """Llama-3.2-3B (28 layers, 8 KV heads of 128) takes 114,688 bytes a token; fp32 twice that of bf16."""
    shape = dataclasses.replace(LLAMA_8B, num_layers=28, num_heads=24)
    assert kv_bytes_per_token(shape, "bfloat16") == 114_688
    assert kv_bytes_per_token(shape, "float32") == 2 * 114_688


@pytest.mark.parametrize(
    ("length", "line"), [(8192, "41.75x"), (2048, "167.00x"), (4096, "83.50x"), (16_384, "20.88x"), (32_768, "10.44x")]
)
def test_start_up_log_of_a_gpu(length: int, line: str) -> None:
    """44,828,721,152 bytes and 4 GiB of swap space are 21,376 GPU blocks and 2,048 CPU blocks; concurrency is slots / length."""
    size = pool(kv_cache_memory=44_828_721_152, swap_space=4, max_model_len=length)
    assert (size.num_slots, size.num_host_slots) == (342_016, 2048 * 16)
    assert size.log_lines(length)[1:] == [
        "# GPU blocks: 21376, # CPU blocks: 2048",
        f"Maximum concurrency for {length} tokens per request: {line}",
    ]


def test_start_up_log_names_the_unit() -> None:
    """On a CPU it says KV blocks, for a pool without blocks KV slots; CPU blocks only where there is swap space."""
    assert pool(num_kv_slots=16_384, on_gpu=False).log_lines(8192)[1] == "# KV blocks: 1024"
    assert pool(num_kv_slots=16_384, on_gpu=False, block_size=0).log_lines(8192)[1] == "# KV slots: 16384"
    assert pool(num_kv_slots=16_384, block_size=0, swap_space=1).log_lines(8192)[1] == "# KV slots: 16384, # CPU slots: 8192"


def test_pool_of_a_gpu_is_what_the_share_leaves() -> None:
    """The share is of the whole device; weights and activations come off it."""
    size = pool(gpu_memory_utilization=0.5, reserved_bytes=20 * GIB)
    assert size.num_slots == (40 * GIB - 20 * GIB) // SLOT
    assert size.num_bytes <= 20 * GIB


def test_pool_of_a_cpu_is_a_quarter_of_the_ram_or_what_is_wanted() -> None:
    """The smaller of a quarter of the available RAM and max_num_seqs x max_model_len."""
    ram = DeviceMemory(total=64 * GIB, available=32 * GIB)
    assert pool(on_gpu=False, device=ram).num_slots == 8 * GIB // SLOT
    assert pool(on_gpu=False, device=ram, max_num_seqs=2).num_slots == 2 * 8192


def test_a_pool_that_whole_blocks_make_too_small_is_refused() -> None:
    """What an allocator makes of the pool is checked again."""
    size = pool(num_kv_slots=8199, max_model_len=8199)
    assert size.num_slots == 8192
    with pytest.raises(ConfigError, match="has 8192 slots of 131072 bytes and cannot hold one request of max_model_len 8199"):
        size.check(8199)


def test_a_pool_too_small_for_one_request_is_refused_with_the_numbers() -> None:
    """max_model_len must fit; the message says what there is, what is needed and what to do."""
    with pytest.raises(ConfigError) as error:
        pool(num_kv_slots=4096)
    assert str(error.value) == (
        "the KV pool (num_kv_slots) has 4096 slots of 131072 bytes and cannot hold one request of max_model_len 8192: "
        "lower max_model_len, or give it more (1.00 GiB are needed)"
    )


def test_a_pool_larger_than_the_device_is_refused_before_it_is_allocated() -> None:
    """The message has what was asked for and what there is."""
    with pytest.raises(ConfigError, match=r"1000000 slots x 131072 bytes = 122\.1 GiB is more than the device's 80\.0 GiB of memory"):
        pool(num_kv_slots=1_000_000)
