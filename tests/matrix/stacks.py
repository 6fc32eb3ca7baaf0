"""Every installed stack, and engines made of one for a tiny model."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.core.assembly import BuiltEngine, LoadedModel, build_engine, load_model
from octavo.core.compat import StackReport, reports
from octavo.core.outputs import RequestOutput, StepReport
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import load_config
from octavo.core.sources import ModelSource
from octavo.core.stack import Stack
from octavo.llm import LLM

REGISTRY = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
KINDS = ("scheduler", "allocator", "kernel", "ops", "model")


def source_of(folder: Path) -> ModelSource:
    """A folder made by the tests as a source; it needs no tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    return ModelSource(name=folder.name, path=folder, origin="made by a test", revision="local", config=config, generation_config={})


def stack_reports(folder: Path) -> list[StackReport]:
    """All stacks of installed plugins for this model in fp32 on a CPU, those that cannot run too."""
    return list(reports(REGISTRY, source_of(folder).config, device="cpu", dtype="float32", kv_dtype="float32"))


def settings(stack: Stack, **options: Any) -> dict[str, Any]:
    """The stack as config sections; `options` are flat: block_size goes where it is understood, other names to their section."""
    sections: dict[str, Any] = {kind: {"plugin": stack.names[kind]} for kind in KINDS}
    sections["engine"] = {"debug": True, "device": "cpu", "dtype": "float32"}
    for name, value in options.items():
        if name == "block_size":
            if name in stack.allocator.plugin.options.model_fields:
                sections["allocator"][name] = value
        elif name in ("max_num_seqs", "max_num_batched_tokens", "preemption"):
            sections["scheduler"][name] = value
        else:
            sections["engine"][name] = value
    return sections


@functools.cache
def loaded(folder: Path, model: str, ops: str) -> LoadedModel:
    """The model on the CPU in fp32, shared by all tests that only read it."""
    overrides = {"model": {"plugin": model}, "ops": {"plugin": ops}, "engine": {"device": "cpu", "dtype": "float32"}}
    return load_model(REGISTRY, load_config(REGISTRY, environ={}, overrides=overrides), source=source_of(folder))


def build(folder: Path, stack: Stack, **options: Any) -> BuiltEngine:
    """An engine of this stack, checking its invariants and with NaN in every slot that nobody wrote."""
    config = load_config(REGISTRY, environ={}, overrides=settings(stack, **options))
    return build_engine(REGISTRY, config, loaded(folder, stack.model.name, stack.ops.name))


class Steps:
    """Remembers the report of every step."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def octavo_step_finished(self, report: StepReport) -> None:
        """Keep it."""
        self.reports.append(report)

    @property
    def preemptions(self) -> int:
        """Of all steps."""
        return sum(report.num_preempted for report in self.reports)


def generate(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    """All prompts, batched."""
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
