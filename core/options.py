"""Base classes of the options that plugins declare: what a user may write into a plugin's own table of the config.

Must not know: which plugins exist, torch, where a value came from.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PluginOptions(BaseModel):
    """Options of one plugin; derive from it, give every field a default and a `description`.

    Strict, because configs are read by people: an unknown name, a bool or a string for a number, and NaN are errors.
    Names that the config itself takes: `plugin` everywhere, and `source`, `revision` and `trust_remote_code` in a model's options.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ClassLimits(PluginOptions):
    """Limits of one class of requests; None is no limit. Over `max_running` a request waits, after `timeout_s` it is ended, over the others
    it is refused.
    """

    max_input_tokens: int | None = Field(None, ge=1, description="longest prompt, in tokens")
    max_output_tokens: int | None = Field(None, ge=1, description="most tokens a request may ask for; one that says nothing gets so many")
    max_running: int | None = Field(None, ge=1, description="most sequences that run at once")
    max_queue: int | None = Field(None, ge=1, description="most requests that wait")
    timeout_s: float | None = Field(None, gt=0, description="seconds after which a request is ended, if it does not ask for less")


class SchedulerOptions(PluginOptions):
    """What every scheduler understands; a scheduler plugin's options derive from it."""

    max_num_seqs: int = Field(256, ge=1, le=65536, description="most sequences that run at once")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens of one step; unset: 2048 for a scheduler that cuts prompts, else as many as max_model_len asks for",
    )
    order: Literal["fcfs", "priority"] = Field(
        "fcfs", description="who goes first: by arrival, or by priority (lower is sooner) with ageing"
    )
    ageing: float = Field(60.0, gt=0, description="seconds of waiting that one priority level is worth; without effect under fcfs")
    classes: dict[str, ClassLimits] = Field(default_factory=dict, description="limits by class of request")
    preemption: Literal["recompute", "swap"] = Field("recompute", description="what happens to the KV of a preempted request")
