"""What a plugin registers: a frozen description of one implementation, and a lazy `build`.

Listing plugins and checking whether a stack runs reads descriptors only; `build` imports the implementation inside, so that
neither imports torch. Words for `provides` and `needs` are defined in `octavo.core.capabilities`.
Must not know: any implementation, the registry, torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from octavo.core.errors import PluginContractError
from octavo.core.options import PluginOptions, SchedulerOptions

if TYPE_CHECKING:
    from octavo.core.attention import Kernel, LayerSpec
    from octavo.core.kv import Allocator
    from octavo.core.model import Model, Ops
    from octavo.core.scheduling import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of device and model before anything is built; every part is checked against it."""

    device: str  # "cpu", "cuda:0"
    dtype: str  # of weights and activations
    kv_dtype: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size_k: int
    head_size_v: int
    windows: frozenset[int] = frozenset()  # the distinct window sizes of layers that have one
    softcap: bool = False
    sinks: bool = False
    tensor_parallel_size: int = 1
    capability: tuple[int, int] | None = None  # CUDA compute capability, where there is one

    @property
    def device_type(self) -> str:
        """The device without its index: "cuda" of "cuda:0"."""
        return self.device.partition(":")[0]

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def provides(self) -> frozenset[str]:
        """Capabilities that device and types give to the plugins."""
        return frozenset({f"device:{self.device_type}", f"dtype:{self.dtype}", f"kv_dtype:{self.kv_dtype}"})

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that the model's layers ask of the other parts."""
        wanted = {"window": bool(self.windows), "softcap": self.softcap, "sinks": self.sinks}
        return frozenset(word for word, needed in wanted.items() if needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model, read from its config.json alone."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size_k: int
    head_size_v: int
    windows: tuple[int | None, ...]  # one a layer; None: full attention
    softcap: float | None = None
    sinks: bool = False
    vocab_size: int
    max_position_embeddings: int
    num_parameters: int | None  # None: known only once the model is loaded
    tied_embeddings: bool = False  # the head's weight is the embedding's
    dtype: str  # the checkpoint's

    def facts(
        self, *, device: str, dtype: str, kv_dtype: str, tensor_parallel_size: int = 1, capability: tuple[int, int] | None = None
    ) -> Facts:
        """The facts of this model on that device, with those types."""
        return Facts(
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size_k=self.head_size_k,
            head_size_v=self.head_size_v,
            windows=frozenset(window for window in self.windows if window is not None),
            softcap=self.softcap is not None,
            sinks=self.sinks,
            tensor_parallel_size=tensor_parallel_size,
            capability=capability,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """What an allocator is built for: slots on the device and in host memory, and the limits of the config."""

    num_slots: int
    num_host_slots: int
    max_model_len: int
    max_num_seqs: int


def _nothing(options: Any, facts: Facts) -> Iterable[str]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """Base of the five kinds. `name` is what a config writes: lower-case letters, digits and underscores."""

    kind: ClassVar[str]
    options_base: ClassVar[type[PluginOptions]] = PluginOptions  # what `options` must derive from

    name: str
    summary: str  # one line, for lists
    build: Callable[..., Any]  # imports the implementation inside; its arguments are the kind's
    options: type[PluginOptions] = PluginOptions
    provides: frozenset[str] = frozenset()
    needs: Callable[[Any, Facts], Iterable[str]] = _nothing  # (options, facts) -> capabilities
    rejects: Callable[[Any, Facts], Iterable[str]] = _nothing  # (options, facts) -> sentences: why it cannot run at all
    avoids: Callable[[Any, Facts], Iterable[str]] = _nothing  # (options, facts) -> sentences: why `auto` had better take another
    preference: int = 0  # `auto` takes the built-in with the highest that runs

    @property
    def implied_needs(self) -> frozenset[str]:
        """Capabilities that follow from the other fields of the descriptor."""
        return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPlugin(Descriptor):
    """`chunking`: it cuts prompts into pieces; one that doesn't needs `max_num_batched_tokens >= max_model_len`."""

    kind = "scheduler"
    options_base = SchedulerOptions

    build: Callable[[Any, Allocator], Scheduler]  # (options, kv)
    options: type[SchedulerOptions] = SchedulerOptions
    chunking: bool


_LAYOUT_NEEDS = {"region": "contiguous_kv", "block_table": "paged_kv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPlugin(Descriptor):
    """`layout`: how a kernel finds the slots of a sequence, by the start of its region or through its block table."""

    kind = "allocator"

    build: Callable[[Any, PoolShape], Allocator]  # (options, pool)
    layout: Literal["region", "block_table"]

    def __post_init__(self) -> None:
        if self.layout not in _LAYOUT_NEEDS:
            raise PluginContractError(f"allocator {self.name!r}: layout must be one of {', '.join(_LAYOUT_NEEDS)}, not {self.layout!r}")

    @property
    def implied_needs(self) -> frozenset[str]:
        """The layout needs a kernel that reads it."""
        return frozenset({_LAYOUT_NEEDS[self.layout]})


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlugin(Descriptor):
    """Attention over the cache."""

    kind = "kernel"

    build: Callable[[Any, tuple[LayerSpec, ...], Facts], Kernel]  # (options, layers, facts)


def other_kv_dtype(options: Any, facts: Facts) -> Iterable[str]:
    """The refusal (`rejects`) of a kernel that keeps KV in the model's own type."""
    if facts.kv_dtype != facts.dtype:
        yield f"keeps KV in the model's dtype: kv_dtype must be {facts.dtype!r} or 'auto', not {facts.kv_dtype!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsPlugin(Descriptor):
    """Everything a layer computes besides attention: linears, norms, RoPE, activations, argmax."""

    kind = "ops"

    build: Callable[[Any, Facts], Ops]  # (options, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlugin(Descriptor):
    """Both functions read a Hugging Face config.json. `accepts` returns None where the plugin runs that model, else why it doesn't."""

    kind = "model"

    build: Callable[..., Model]  # (source: ModelSource, options, ops, *, shard: (rank, size), dtype: torch.dtype, device: torch.device)
    accepts: Callable[[Mapping[str, Any]], str | None]
    describe: Callable[[Mapping[str, Any]], ModelShape]


KINDS: dict[str, type[Descriptor]] = {
    plugin.kind: plugin for plugin in (ModelPlugin, SchedulerPlugin, AllocatorPlugin, KernelPlugin, OpsPlugin)
}
