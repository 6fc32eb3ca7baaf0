"""Splits forward passes into attention, linears and the rest, by timers around the kernel's calls and the linears.

For a repeat of its own: timers take time, on a GPU each waits for the device, and what a stack is compared by is measured without
them. Works on any stack: a kernel's `prepare`, `write` and `attend` are attention; the linears are those of the model's `Ops`, or its torch
modules. Ops that run all layers in one call run them one by one here, since within a call nothing can be timed: a timed step is slower by
the timers and by Python's way through the layers. Must not know: any plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

from octavo.core.engine import Engine
from octavo.core.model import Model, Ops
from octavo.core.outputs import StepReport
from octavo.core.torch_runner import TorchRunner

ATTENTION = ("prepare", "write", "attend", "write_and_attend")
LINEARS = ("linear", "linear_add", "swiglu", "argmax")
BLOCKS = ("attention_inputs", "attention_outputs")
"""Made of other calls, unless the ops fuse them: then norms and RoPE can't be told from the linears that they are fused with."""
MODULES = ("Linear", "Conv1D")
HEAD = ("logits", "argmax")
"""Of the model: whatever its linears are, these are the head's, and count as linears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardParts:
    """Seconds of one step's forward pass, or of many."""

    attention: float
    linear: float  # what the ops fuse with one is in it: activations, norms, RoPE
    rest: float  # embedding, norms, RoPE, residuals, what lies between

    @property
    def forward(self) -> float:
        """All of it."""
        return self.attention + self.linear + self.rest


@dataclass(slots=True)
class StepParts:
    """The forward passes of the steps so far, in their order, with those steps' numbers."""

    steps: list[tuple[int, ForwardParts]] = field(default_factory=list)
    heads: list[float] = field(default_factory=list)  # seconds of each step's `linear` that the head took
    knows_linears: bool = True  # False: the model has neither Ops nor torch modules, and its linears are in the rest
    _spent: dict[str, float] = field(default_factory=dict)
    _inside: bool = False  # a timed call runs: what it calls itself is in it

    @property
    def total(self) -> ForwardParts:
        """Of all steps."""
        return ForwardParts(
            attention=sum(parts.attention for _, parts in self.steps),
            linear=sum(parts.linear for _, parts in self.steps),
            rest=sum(parts.rest for _, parts in self.steps),
        )

    def octavo_step_finished(self, report: StepReport) -> None:
        """Keep one step."""
        spent, self._spent = self._spent, {}
        forward = report.seconds.get("forward", 0.0)
        if report.num_rows and not report.error:
            attention, head = spent.get("attention", 0.0), spent.get("head", 0.0)
            linear = spent.get("linear", 0.0) + head
            self.heads.append(head)
            parts = ForwardParts(attention=attention, linear=linear, rest=max(0.0, forward - attention - linear))
            self.steps.append((report.step, parts))

    def timed(self, part: str, call: Callable[..., Any], wait: Callable[[], object]) -> Callable[..., Any]:
        """The same call, its time noted under this part."""

        def measured(*args: Any, **named: Any) -> Any:
            if self._inside:
                return call(*args, **named)
            wait()
            begun = perf_counter()
            self._inside = True
            try:
                return call(*args, **named)
            finally:
                wait()
                self._inside = False
                self._spent[part] = self._spent.get(part, 0.0) + perf_counter() - begun

        return measured


@contextmanager
def timed_parts(engine: Engine) -> Iterator[StepParts]:
    """Time the forward passes of the engine's steps meanwhile. Raises TypeError for an engine that runs no model."""
    runner = engine.runner
    if not isinstance(runner, TorchRunner):
        raise TypeError(f"{type(runner).__name__} runs no model whose parts could be timed")
    parts, device = StepParts(), runner.model.device

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with ExitStack() as undo:
        engine.observers.add(parts)
        undo.callback(engine.observers.remove, parts)
        for name in ATTENTION:
            _replace(undo, runner.kernel, name, parts.timed("attention", getattr(runner.kernel, name), wait))
        found = list(_linears(runner.model))
        parts.knows_linears = bool(found)
        for owner, names in found:
            if isinstance(owner, Ops):
                _replace(undo, owner, "blocks", partial(Ops.blocks, owner))
            for name in names:
                _replace(undo, owner, name, parts.timed("linear", getattr(owner, name), wait))
        for name in HEAD:
            _replace(undo, runner.model, name, parts.timed("head", getattr(runner.model, name), wait))
        yield parts


def _replace(undo: ExitStack, owner: Any, name: str, call: Callable[..., Any]) -> None:
    """For this object alone, not for its class; undone at the end."""
    owner.__dict__[name] = call
    undo.callback(owner.__dict__.pop, name)


def _linears(model: Model) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The objects that compute linears, and by which methods: what the model holds, or what that holds."""
    held = list(vars(model).values())
    held += [inner for value in held for inner in getattr(value, "__dict__", {}).values()]
    seen = set[int]()
    for value in held:
        if isinstance(value, Ops) and id(value) not in seen:
            seen.add(id(value))
            yield value, LINEARS + tuple(name for name in BLOCKS if getattr(type(value), name) is not getattr(Ops, name))
        elif isinstance(value, torch.nn.Module):
            for module in value.modules():
                if type(module).__name__ in MODULES and id(module) not in seen:
                    seen.add(id(module))
                    yield module, ("forward",)
