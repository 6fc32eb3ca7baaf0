"""An engine on the fake runner with its clock in the test's hand: what a directed test of a scheduler or an allocator drives.

Must not know: any plugin; who calls brings scheduler and allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.clock import ManualClock
from octavo.core.engine import Engine
from octavo.core.kv import Allocator
from octavo.core.outputs import RequestOutput, StepReport
from octavo.core.plan import BatchPlan
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduling import Scheduler
from octavo.core.testing.fake_model import EOS, VOCAB_SIZE
from octavo.core.testing.fake_runner import FailurePoint, FakeRunner
from octavo.core.text.tokenizer import Tokenizer

_OF_THE_REQUEST = {"request_id", "priority", "class_name", "user", "stream"}


class Rig:
    """One engine and its parts. Steps take a second; reports and outputs are gathered; invariants are checked after each step."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv: Allocator,
        *,
        max_model_len: int,
        depth: int = 1,
        failures: Mapping[int, FailurePoint] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.runner = FakeRunner(kv, failures=failures)
        self.clock = ManualClock()
        self.engine = Engine(
            scheduler=scheduler,
            kv=kv,
            runner=self.runner,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            tokenizer=tokenizer,
            clock=self.clock,
            depth=depth,
            debug=True,
        )
        self.engine.observers.add(self)
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.reports: list[StepReport] = []

    def octavo_step_finished(self, report: StepReport) -> None:
        """Gather the reports."""
        self.reports.append(report)

    @property
    def plans(self) -> list[BatchPlan]:
        """What was submitted."""
        return self.runner.plans

    def add(self, prompt_len: int = 4, max_tokens: int = 4, **settings: Any) -> Request:
        """Add a request; it runs to `max_tokens` unless `settings` (of sampling, of beams or of the request) say otherwise."""
        params = {"ignore_eos": True} | {name: value for name, value in settings.items() if name not in _OF_THE_REQUEST}
        others = {name: value for name, value in settings.items() if name in _OF_THE_REQUEST}
        prompt = [1 + (number * 7 + prompt_len) % 3 for number in range(prompt_len)]
        kind = BeamSearchParams if "beam_width" in params else SamplingParams
        return self.engine.add_request(prompt, kind(max_tokens=max_tokens, **params), **others)

    def step(self, count: int = 1) -> None:
        """Step, a second each."""
        for _ in range(count):
            for output in self.engine.step():
                self.outputs.setdefault(output.request_id, []).append(output)
            self.clock.advance(1.0)

    def finish(self, limit: int = 500) -> None:
        """Step until nothing is left to do. Raises AssertionError if that takes too long or something is still held then."""
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
            if self.engine.wait_until is not None:
                self.clock.sleep_until(self.engine.wait_until)
        usage = self.kv.usage()
        if self.engine.has_work or usage.filled or usage.held or usage.host:
            raise AssertionError(f"after {limit} steps: requests {list(self.engine.requests)}, {usage}")

    def answers(self, request: Request) -> list[tuple[list[int], str | None]]:
        """Token ids and finish reason of each output of a request that is over."""
        answer = self.outputs[request.id][-1]
        return [(output.token_ids, output.finish_reason) for output in answer.outputs]

    def error(self, request: Request) -> str:
        """What went wrong with a request of one sequence that the engine ended."""
        (output,) = self.outputs[request.id][-1].outputs
        if output.finish_reason != "error" or output.error is None:
            raise AssertionError(f"{request.id} ended with {output.finish_reason!r}, not with an error")
        return output.error
