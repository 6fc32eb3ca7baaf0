"""The `[engine]` section of the config: what belongs to no plugin."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from octavo.core.options import PluginOptions
from octavo.core.settings.sizes import Size

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def _refuse_quantised(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("fp8", "float8", "int8")):
        raise ValueError(f"a KV cache in {value} is not available yet; use 'auto', 'float32', 'bfloat16' or 'float16'")
    return value


class SpeculativeConfig(PluginOptions):
    """Speculative decoding: several tokens a step where the next ones can be guessed. Names are vLLM's."""

    method: Literal["ngram"] = Field("ngram", description="who guesses; ngram: what followed the last tokens where they stood before")
    num_speculative_tokens: int = Field(4, ge=1, le=64, description="most tokens guessed for a sequence and step")
    prompt_lookup_max: int = Field(4, ge=1, le=64, description="most last tokens that are looked for; long matches go first")
    prompt_lookup_min: int = Field(2, ge=1, le=64, description="fewest of them; lower guesses more often, and wrong more often")

    @model_validator(mode="after")
    def _shortest_first(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min = {self.prompt_lookup_min} is more than prompt_lookup_max = {self.prompt_lookup_max}")
        return self


class EngineSettings(PluginOptions):
    """Settings of the engine itself. Exactly one of `kv_cache_memory` and `num_kv_slots`, or none, sizes the KV pool."""

    max_model_len: int | None = Field(None, ge=1, description="longest prompt and output together, in tokens; unset: what the model allows")
    gpu_memory_utilization: float = Field(
        0.92, gt=0, le=1, description="share of the whole device that Octavo may use for weights, activations and KV; unused on a CPU"
    )
    kv_cache_memory: Size | None = Field(None, description='size of the KV pool, in bytes or like "4GiB"')
    num_kv_slots: int | None = Field(None, ge=1, description="size of the KV pool in slots (tokens), exactly; for comparisons")
    swap_space: float = Field(0.0, ge=0, description='host memory for the KV of preempted requests, in GiB; for preemption = "swap"')
    dtype: Dtype = Field("auto", description="of weights and activations; auto: the checkpoint's, where the device computes in it")
    kv_dtype: Annotated[Dtype, BeforeValidator(_refuse_quantised)] = Field("auto", description="of the KV cache; auto: as dtype")
    device: str = Field("auto", pattern=r"^[a-z]+(:\d+)?$", description="auto, cpu, cuda, cuda:1, ...")
    num_threads: int | None = Field(
        None,
        ge=1,
        description="threads that compute on the CPU; unset: its physical cores that this process may use, at most OMP_NUM_THREADS",
    )
    seed: int = Field(0, ge=0, description="of the random numbers of requests that bring no seed")
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="sampling of calls without params; auto: what the model's generation_config.json says, none: Octavo's defaults",
    )
    speculative_config: SpeculativeConfig | None = Field(None, description="speculative decoding, a table of its own; unset: off")
    debug: bool = Field(False, description="check invariants after each step and fill unwritten KV with NaN; slow")

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.kv_cache_memory is not None and self.num_kv_slots is not None:
            raise ValueError("kv_cache_memory and num_kv_slots both size the KV pool; set one of them")
        return self
