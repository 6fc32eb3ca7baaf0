"""What is decided once model and device are known: `auto`, lengths, budgets, types."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.descriptors import Descriptor
from octavo.core.errors import IncompatibleStackError, InvalidOptionsError
from octavo.core.registry import Provider, Registry
from octavo.core.settings.config import load_config
from octavo.core.settings.engine import EngineSettings
from octavo.core.settings.resolve import ResolvedConfig, choose_model, passed_over, resolve, resolve_dtypes
from octavo.core.testing.fake_plugins import TINY_CONFIG, fake_allocator, fake_kernel, fake_model, fake_ops, fake_scheduler, fake_shape

THIRD_PARTY = Provider("octavo-fast", "2.0")


def registry_of(*plugins: Descriptor) -> Registry:
    registry = Registry()
    for plugin in (fake_scheduler(), fake_scheduler("chunked", chunking=True), fake_allocator("prefix"), fake_model(), *plugins):
        registry.add(plugin)
    return registry


@pytest.fixture
def registry() -> Registry:
    return registry_of(fake_kernel(), fake_ops())


def resolved(registry: Registry, *, device: str = "cpu", shape: Any = None, **overrides: Any) -> ResolvedConfig:
    shape = shape or fake_shape()
    config = load_config(registry, environ={}, overrides=overrides)
    facts = shape.facts(device=device, dtype="float32", kv_dtype="float32")
    return resolve(registry, config, model=choose_model(registry, config.model, TINY_CONFIG), shape=shape, facts=facts)


def complaint(registry: Registry, **overrides: Any) -> str:
    with pytest.raises(InvalidOptionsError) as error:
        resolved(registry, **overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("scheduler", "max_model_len", "budget"),
    [
        ({"plugin": "continuous"}, None, 8192),  # a whole prompt of the model's length
        ({"plugin": "continuous"}, 100, 256),  # one token of each of 256 sequences
        ({"plugin": "chunked"}, None, 2048),
        ({"plugin": "chunked", "max_num_seqs": 4096}, None, 4096),
        ({"plugin": "chunked", "max_num_batched_tokens": 256}, None, 256),
        ({"plugin": "continuous", "max_num_batched_tokens": 16384}, None, 16384),
        ({"plugin": "continuous", "max_num_batched_tokens": 8192}, None, 8192),  # exactly the longest prompt
    ],
)
def test_the_budget_is_filled_in(registry: Registry, scheduler: dict[str, Any], max_model_len: int | None, budget: int) -> None:
    """2,048 where prompts are cut, else what the lengths ask for; a number that was set stays."""
    engine = {} if max_model_len is None else {"max_model_len": max_model_len}
    assert resolved(registry, scheduler=scheduler, engine=engine).scheduler_options.max_num_batched_tokens == budget


def test_budget_below_the_sequences(registry: Registry) -> None:
    """A step must hold one token of each running sequence; both numbers are said."""
    assert complaint(registry, scheduler={"plugin": "chunked", "max_num_batched_tokens": 100}) == (
        "scheduler.chunked.max_num_batched_tokens: 100 is less than max_num_seqs = 256, but a step must hold one token of each sequence; "
        "raise it to at least 256 or lower max_num_seqs to 100"
    )


def test_budget_below_a_whole_prompt(registry: Registry) -> None:
    """Where prompts run whole, a step must hold the longest; the numbers and three ways out are said."""
    assert complaint(registry, scheduler={"plugin": "continuous", "max_num_batched_tokens": 2048}) == (
        "scheduler.continuous.max_num_batched_tokens: 2048 is less than max_model_len = 8192, but scheduler 'continuous' runs prompts "
        'whole; raise it to at least 8192, lower max_model_len to 2048, or choose a scheduler that cuts prompts ("chunked")'
    )


def test_length_beyond_the_model(registry: Registry) -> None:
    """More positions than the model has are refused with both numbers; none given means all of them."""
    text = "engine.max_model_len: 9000 is more than the 8192 positions of the model; set at most 8192"
    assert complaint(registry, engine={"max_model_len": 9000}) == text
    assert resolved(registry).max_model_len == 8192
    assert resolved(registry, engine={"max_model_len": 64}).max_model_len == 64


def test_auto_takes_the_most_preferred_built_in_that_runs() -> None:
    """A kernel for another device is passed over, a third-party one isn't considered, and naming one wins over preference."""
    gpu = fake_kernel("gpu", preference=9, needs=lambda options, facts: {"device:cuda"})
    registry = registry_of(gpu, fake_kernel("slow"), fake_kernel("quick", preference=5), fake_ops())
    registry.add(fake_kernel("fast", preference=99), provider=THIRD_PARTY)
    assert resolved(registry).stack.names["kernel"] == "quick"
    assert resolved(registry, device="cuda:0").stack.names["kernel"] == "gpu"
    assert resolved(registry, kernel="fast").stack.names["kernel"] == "fast"


def test_auto_says_what_it_goes_without() -> None:
    """What is for this device, preferred and refuses, once a reason; not what is for another device, less preferred, or was not auto's."""
    refuses: dict[str, Any] = {"rejects": lambda options, facts: ["needs a compiler"], "needs": lambda options, facts: {"device:cpu"}}
    gpu = fake_kernel("gpu", preference=9, rejects=refuses["rejects"], needs=lambda options, facts: {"device:cuda"})
    kernels = (gpu, fake_kernel("quick", preference=5, **refuses), fake_kernel("slow"), fake_kernel("worse", preference=-1, **refuses))
    registry = registry_of(*kernels, fake_ops("fast", preference=5, **refuses), fake_ops())

    def told(**overrides: Any) -> list[str]:
        config = load_config(registry, environ={}, overrides=overrides)
        found = resolved(registry, **overrides)
        return passed_over(registry, config, found.stack, found.facts)

    assert told() == ["auto goes without kernel 'quick' (it takes 'slow') and ops 'fast' (it takes 'torch'): needs a compiler"]
    assert told(kernel="slow") == ["auto goes without ops 'fast' (it takes 'torch'): needs a compiler"]
    assert told(kernel="slow", ops="torch") == []


def test_auto_takes_what_had_better_be_avoided_last() -> None:
    """It says so; where nothing else runs, or where it was named, it is taken all the same."""
    avoids: dict[str, Any] = {"avoids": lambda options, facts: ["slower than torch"]}
    registry = registry_of(fake_kernel("slow"), fake_ops("fast", preference=5, **avoids), fake_ops())
    found = resolved(registry)
    assert found.stack.names["ops"] == "torch"
    told = passed_over(registry, load_config(registry, environ={}), found.stack, found.facts)
    assert told == ["auto goes without ops 'fast' (it takes 'torch'): slower than torch"]
    assert resolved(registry, ops="fast").stack.names["ops"] == "fast"
    assert resolved(registry_of(fake_kernel("slow"), fake_ops("fast", **avoids))).stack.names["ops"] == "fast"


def test_auto_says_why_nothing_runs() -> None:
    """Where no built-in runs, the favourite's reasons are the error."""
    registry = registry_of(fake_kernel("gpu", needs=lambda options, facts: {"device:cuda"}), fake_ops())
    with pytest.raises(IncompatibleStackError, match="kernel 'gpu' needs device:cuda, but device is cpu"):
        resolved(registry)


def test_auto_with_third_party_plugins_only() -> None:
    """Installing never activates: the error names what could be chosen."""
    registry = registry_of(fake_ops())
    registry.add(fake_kernel("fast"), provider=THIRD_PARTY)
    with pytest.raises(IncompatibleStackError) as error:
        resolved(registry)
    assert str(error.value) == "auto finds no built-in kernel plugin; set kernel.plugin to an installed one (fast)"


def test_an_incompatible_stack_is_refused() -> None:
    """Named parts that don't fit raise with the mend."""
    registry = registry_of(fake_kernel("x", provides=frozenset()), fake_kernel("y"), fake_ops())
    with pytest.raises(IncompatibleStackError, match='One change that would make it run: kernel = "y"'):
        resolved(registry, kernel="x")


def test_auto_model_takes_the_first_that_accepts() -> None:
    """By preference among the built-ins that accept the architecture."""
    registry = Registry()
    for plugin in (fake_model("llama", preference=2, architecture="Llama"), fake_model("any", preference=1), fake_model("other")):
        registry.add(plugin)
    assert choose_model(registry, None, TINY_CONFIG).name == "any"


def test_a_third_party_model_plugin_is_named_not_taken() -> None:
    """Where only an installed third-party plugin accepts the architecture, the error says how to choose it."""
    registry = Registry()
    registry.add(fake_model("llama", architecture="LlamaForCausalLM"))
    registry.add(fake_model("tiny"), provider=THIRD_PARTY)
    with pytest.raises(IncompatibleStackError) as error:
        choose_model(registry, None, TINY_CONFIG)
    assert str(error.value) == (
        "no built-in model plugin accepts this model (architecture: TinyForCausalLM):\n"
        "  - llama: it runs LlamaForCausalLM only\n"
        '  - tiny of octavo-fast 2.0 accepts it: set model.plugin = "tiny"'
    )


def test_a_named_model_plugin_must_accept() -> None:
    """The reason, and who would accept."""
    registry = Registry()
    registry.add(fake_model("llama", architecture="LlamaForCausalLM"))
    config = load_config_with(registry, model={"plugin": "llama"})
    with pytest.raises(IncompatibleStackError) as error:
        choose_model(registry, config.model, TINY_CONFIG)
    text = "model 'llama' does not accept this model: it runs LlamaForCausalLM only"
    assert str(error.value) == f"{text}; no installed model plugin does"
    registry.add(fake_model("tiny"))
    with pytest.raises(IncompatibleStackError) as error:
        choose_model(registry, config.model, TINY_CONFIG)
    assert str(error.value) == f'{text}; set model.plugin = "tiny"'


def load_config_with(registry: Registry, **overrides: Any) -> Any:
    for plugin in (fake_scheduler("chunked", chunking=True), fake_allocator("prefix")):
        registry.add(plugin)
    return load_config(registry, environ={}, overrides=overrides)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "native", "expected"),
    [
        ("auto", "auto", {"float32", "bfloat16"}, ("bfloat16", "bfloat16")),
        ("auto", "auto", {"float32"}, ("float32", "float32")),
        ("float16", "auto", {"float32"}, ("float16", "float16")),
        ("auto", "float32", {"bfloat16"}, ("bfloat16", "float32")),
    ],
)
def test_types(dtype: Any, kv_dtype: Any, native: set[str], expected: tuple[str, str]) -> None:
    """`auto` is the checkpoint's bfloat16 where the device computes in it, else float32; the cache follows; what is named stays."""
    assert resolve_dtypes(EngineSettings(dtype=dtype, kv_dtype=kv_dtype), "bfloat16", native) == expected
