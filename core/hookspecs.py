"""The eight hooks. A plugin package declares a module as entry point of group `octavo`; its functions marked `@hookimpl` are found:

    from octavo.core.hookspecs import hookimpl

    @hookimpl
    def octavo_schedulers():
        return [FAIR]

Five hooks return descriptors and are called once, when plugins are listed. Three are observers: installed ones are told and can change
nothing; one that raises is logged and dropped. No hook is called per token or per layer. Must not know: any plugin, torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

from octavo.core.descriptors import AllocatorPlugin, KernelPlugin, ModelPlugin, OpsPlugin, SchedulerPlugin

if TYPE_CHECKING:
    from octavo.core.outputs import RequestOutput, StepReport
    from octavo.core.stack import Stack

hookspec = pluggy.HookspecMarker("octavo")
hookimpl = pluggy.HookimplMarker("octavo")


@hookspec
def octavo_schedulers() -> Iterable[SchedulerPlugin]:  # type: ignore[empty-body]
    """Return the schedulers of this package: who runs in a step, and with how many tokens."""


@hookspec
def octavo_allocators() -> Iterable[AllocatorPlugin]:  # type: ignore[empty-body]
    """Return the allocators of this package: which slots of the KV pool a sequence holds."""


@hookspec
def octavo_kernels() -> Iterable[KernelPlugin]:  # type: ignore[empty-body]
    """Return the attention kernels of this package: how queries attend over the KV cache."""


@hookspec
def octavo_models() -> Iterable[ModelPlugin]:  # type: ignore[empty-body]
    """Return the model families of this package: how a checkpoint becomes a forward pass."""


@hookspec
def octavo_ops() -> Iterable[OpsPlugin]:  # type: ignore[empty-body]
    """Return the layer operations of this package besides attention: linears, norms, RoPE, activations, argmax."""


@hookspec
def octavo_engine_started(stack: Stack) -> None:
    """Be told that an engine with this stack is ready."""


@hookspec
def octavo_step_finished(report: StepReport) -> None:
    """Be told of every step: its plan in numbers, KV usage, times by part; of one that was undone, with its `error`."""


@hookspec
def octavo_request_finished(output: RequestOutput) -> None:
    """Be told of every request that ended, with its last output."""


DESCRIPTOR_HOOKS: dict[str, str] = {  # hook: the kind it returns
    "octavo_models": "model",
    "octavo_schedulers": "scheduler",
    "octavo_allocators": "allocator",
    "octavo_kernels": "kernel",
    "octavo_ops": "ops",
}
OBSERVER_HOOKS: dict[str, str] = {  # hook: its argument
    "octavo_engine_started": "stack",
    "octavo_step_finished": "report",
    "octavo_request_finished": "output",
}
