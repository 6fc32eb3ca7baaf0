"""Timers see each call once, on every stack, change no token, and are gone afterwards."""

from __future__ import annotations

import time
from typing import Any

import pytest

from octavo.bench.step_parts import BLOCKS, LINEARS, ForwardParts, StepParts, timed_parts
from octavo.core.engine import Engine
from octavo.core.sampling_params import SamplingParams
from tests.bench.pools import rig
from tests.matrix.stacks import build, stack_reports
from tests.models import tiny

STACKS = [r.stack for r in stack_reports(tiny("llama_gqa")) if r.runs and r.stack.scheduler.name == "chunked"]
STACKS = [s for s in STACKS if s.allocator.name != "prefix" and s.kernel.name != "triton_paged"]


def tokens(engine: Engine) -> list[int]:
    engine.add_request([3, 1, 4, 1, 5], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    found: list[int] = []
    while engine.has_work:
        for output in engine.step():
            found += output.outputs[0].token_ids
    return found


@pytest.mark.parametrize("stack", STACKS, ids=lambda s: f"{s.allocator.name}-{s.kernel.name}-{s.ops.name}-{s.model.name}")
def test_attention_linears_and_the_rest(stack: Any) -> None:
    """Each takes some time, together the forward pass; the model and the kernel are as before afterwards."""
    engine = build(tiny("llama_gqa"), stack, max_num_seqs=4, max_model_len=64, num_kv_slots=512).engine
    expected, before = tokens(engine), dict(vars(engine.runner.kernel))  # type: ignore[attr-defined]
    seconds: list[float] = []

    class Watch:
        def octavo_step_finished(self, report: Any) -> None:
            seconds.append(report.seconds["forward"])

    engine.observers.add(Watch())
    with timed_parts(engine) as parts:
        assert tokens(engine) == expected
    assert parts.knows_linears and len(parts.steps) == 4
    for (_, step), forward in zip(parts.steps, seconds, strict=True):
        assert step.attention > 0 and step.linear > 0 and step.rest > 0
        assert step.forward == pytest.approx(forward)
    assert vars(engine.runner.kernel).keys() == before.keys()  # type: ignore[attr-defined]
    assert tokens(engine) == expected and len(parts.steps) == 4
    engine.close()


@pytest.mark.parametrize("stack", STACKS, ids=lambda s: f"{s.allocator.name}-{s.kernel.name}-{s.ops.name}-{s.model.name}")
def test_all_of_the_attention_is_attention(stack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the engine calls of the kernel in a layer: what it does is slow here, and what is slow is under attention."""
    built = build(tiny("llama_gqa"), stack, max_num_seqs=4, max_model_len=64, num_kv_slots=512)
    kernel = built.engine.runner.kernel  # type: ignore[attr-defined]
    whole = kernel.write_and_attend

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(0.01)
        return whole(*args)

    monkeypatch.setattr(type(kernel), "write_and_attend", slow)
    with timed_parts(built.engine) as parts:
        tokens(built.engine)
    assert all(step.attention >= 0.01 * len(kernel.layers) for _, step in parts.steps)
    built.engine.close()


def test_a_call_within_a_timed_call_is_in_it() -> None:
    """swiglu that calls linear counts once."""
    parts = StepParts()
    inner = parts.timed("linear", lambda: 1, lambda: None)
    outer = parts.timed("attention", lambda: inner() + 1, lambda: None)
    assert outer() == 2 and set(parts._spent) == {"attention"}
    assert inner() == 1 and set(parts._spent) == {"attention", "linear"}


def test_the_names_are_those_of_ops() -> None:
    """What is timed exists; norms and RoPE are the rest."""
    from octavo.core.model import Ops

    assert {name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")} == {
        *(*LINEARS, *BLOCKS),
        *("pack", "pack_gate_up", "packed_bytes", "rows", "rms_norm", "rope", "blocks"),
    }


def test_parts_add_up() -> None:
    found = StepParts(steps=[(0, ForwardParts(attention=1, linear=2, rest=3)), (1, ForwardParts(attention=1, linear=1, rest=1))]).total
    assert (found.attention, found.linear, found.rest, found.forward) == (2, 3, 4, 9)


def test_an_engine_without_a_model() -> None:
    with pytest.raises(TypeError, match="FakeRunner runs no model"), timed_parts(rig("paged", slots=16).engine):
        pass
