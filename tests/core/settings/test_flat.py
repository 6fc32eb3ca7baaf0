"""The flat names of `LLM(...)`: each lands in its place, and contradictions are said."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import InvalidOptionsError
from octavo.core.settings.flat import NAMES, from_flat

PLACES: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("folder", {"model": {"source": "folder"}}),
    "model_plugin": ("llama", {"model": {"plugin": "llama"}}),
    "scheduler": ("static", {"scheduler": {"plugin": "static"}}),
    "allocator": ({"plugin": "paged", "block_size": 4}, {"allocator": {"plugin": "paged", "block_size": 4}}),
    "kernel": ("naive", {"kernel": {"plugin": "naive"}}),
    "ops": ("torch", {"ops": {"plugin": "torch"}}),
    "block_size": (16, {"allocator": {"block_size": 16}}),
    "max_num_seqs": (256, {"scheduler": {"max_num_seqs": 256}}),
    "max_num_batched_tokens": (4096, {"scheduler": {"max_num_batched_tokens": 4096}}),
    "max_model_len": (8192, {"engine": {"max_model_len": 8192}}),
    "gpu_memory_utilization": (0.9, {"engine": {"gpu_memory_utilization": 0.9}}),
    "kv_cache_memory": ("4GiB", {"engine": {"kv_cache_memory": "4GiB"}}),
    "num_kv_slots": (64, {"engine": {"num_kv_slots": 64}}),
    "swap_space": (0, {"engine": {"swap_space": 0}}),
    "dtype": ("float32", {"engine": {"dtype": "float32"}}),
    "kv_dtype": ("auto", {"engine": {"kv_dtype": "auto"}}),
    "device": ("cpu", {"engine": {"device": "cpu"}}),
    "num_threads": (2, {"engine": {"num_threads": 2}}),
    "seed": (0, {"engine": {"seed": 0}}),
    "speculative_config": ({"prompt_lookup_max": 3}, {"engine": {"speculative_config": {"prompt_lookup_max": 3}}}),
    "generation_config": ("none", {"engine": {"generation_config": "none"}}),
    "debug": (True, {"engine": {"debug": True}}),
    "revision": ("v1", {"model": {"revision": "v1"}}),
    "trust_remote_code": (True, {"model": {"trust_remote_code": True}}),
    "preset": ("chat", {"preset": "chat"}),
    "enable_chunked_prefill": (True, {"scheduler": {"plugin": "chunked"}}),
    "enable_prefix_caching": (True, {"allocator": {"plugin": "prefix"}}),
}


def complaint(**settings: Any) -> str:
    with pytest.raises(InvalidOptionsError) as error:
        from_flat(**settings)
    return str(error.value)


def test_every_flat_name_is_tested_here() -> None:
    """A new name needs a line in PLACES."""
    assert set(NAMES) == set(PLACES)


@pytest.mark.parametrize("name", PLACES)
def test_each_name_lands_in_its_place(name: str) -> None:
    """Alone, a name sets exactly one thing."""
    value, expected = PLACES[name]
    assert from_flat(**{name: value}) == expected


def test_flat_names_and_tables_go_together() -> None:
    """A plugin's table and flat options of its section are one table; None is not given."""
    settings = from_flat(model="m", scheduler={"plugin": "static", "order": "priority"}, max_num_seqs=4, block_size=None)
    assert settings == {"model": {"source": "m"}, "scheduler": {"plugin": "static", "order": "priority", "max_num_seqs": 4}}


def test_false_is_the_plugin_without_the_feature() -> None:
    """... unless a plugin without it is named anyway."""
    assert from_flat(enable_chunked_prefill=False) == {"scheduler": {"plugin": "continuous"}}
    assert from_flat(enable_prefix_caching=False, block_size=4) == {"allocator": {"plugin": "paged", "block_size": 4}}
    assert from_flat(enable_chunked_prefill=False, scheduler="static") == {"scheduler": {"plugin": "static"}}
    assert from_flat(enable_chunked_prefill=True, scheduler={"plugin": "chunked"}) == {"scheduler": {"plugin": "chunked"}}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"enable_chunked_prefill": True, "scheduler": "static"},
            'enable_chunked_prefill=True is short for scheduler = "chunked" and contradicts scheduler = "static"; leave one of them out',
        ),
        (
            {"enable_chunked_prefill": False, "scheduler": "chunked"},
            'enable_chunked_prefill=False contradicts scheduler = "chunked"; leave one of them out',
        ),
        (
            {"enable_prefix_caching": True, "allocator": {"plugin": "paged"}},
            'enable_prefix_caching=True is short for allocator = "prefix" and contradicts allocator = "paged"; leave one of them out',
        ),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching: must be True or False (got 1)"),
        ({"block_size": 4, "allocator": {"plugin": "paged", "block_size": 8}}, "block_size: given twice, also inside allocator"),
        ({"kernel": 3}, "kernel: takes a plugin's name or its table (got 3)"),
        ({"max_num_seq": 3}, f"max_num_seq: no such setting (did you mean max_num_seqs?); settings are {', '.join(NAMES)}"),
    ],
)
def test_what_cannot_be_meant_is_an_error(settings: dict[str, Any], text: str) -> None:
    """Unknown names, settings given twice and contradictions, each with its text."""
    assert complaint(**settings) == text


def test_all_mistakes_are_said_at_once() -> None:
    """Two mistakes, two lines."""
    lines = complaint(kernel=3, sede=1).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["sede", "kernel"]
