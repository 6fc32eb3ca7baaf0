"""Every installed stack on the same prompts: does it run, how, and are the tokens the same?

One run a stack, in fp32, all around one loaded model and one pool size: a look at what differs, no benchmark. The tokens are compared
with those of transformers' `generate`, one prompt at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from octavo.bench.run_totals import RunTotals
from octavo.core.assembly import LoadedModel, build_engine, load_model
from octavo.core.compat import StackReport, reports
from octavo.core.errors import OctavoError
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import EngineConfig
from octavo.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stack: `problem` says why it did not run; otherwise its figures."""

    stack: StackReport
    problem: str = ""
    tokens_per_second: float = 0.0
    totals: RunTotals | None = None
    same: int = 0  # prompts whose tokens equal the reference
    of: int = 0


def reference_tokens(loaded: LoadedModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Greedy tokens of each prompt alone, by transformers in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(loaded.source.path, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as ignore_eos does
    for prompt, length in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0)
        yield made[0, len(prompt) :].tolist()


def compare_stacks(
    registry: Registry,
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    expected: Sequence[Sequence[int]],
) -> Iterator[Row]:
    """Run each stack in turn; yields a row as soon as it is known.

    `prompts` are token ids, `lengths` how many tokens each is continued by (EOS ignored), `expected` what should come out.
    """
    facts = loaded.facts
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    for report in reports(registry, loaded.source.config, device=facts.device, dtype=facts.dtype, kv_dtype=facts.kv_dtype):
        if not report.runs:
            yield Row(stack=report, problem="; ".join(report.problems))
            continue
        try:
            yield _run(registry, _with_stack(config, report), loaded, report, prompts, params, expected)
        except OctavoError as error:
            yield Row(stack=report, problem=str(error))


def _with_stack(config: EngineConfig, report: StackReport) -> EngineConfig:
    """The stack's plugins with default options, but max_num_seqs as configured."""
    stack = report.stack
    options = stack.scheduler.options.model_copy(update={"max_num_seqs": config.scheduler.options.max_num_seqs})  # type: ignore[attr-defined]
    scheduler = replace(stack.scheduler, options=options)
    return replace(config, scheduler=scheduler, allocator=stack.allocator, kernel=stack.kernel, ops=stack.ops)


def _run(
    registry: Registry,
    config: EngineConfig,
    loaded: LoadedModel,
    report: StackReport,
    prompts: Sequence[Sequence[int]],
    params: list[SamplingParams],
    expected: Sequence[Sequence[int]],
) -> Row:
    if (report.stack.model.name, report.stack.ops.name) != (loaded.choice.name, loaded.ops.name):
        loaded = load_model(registry, replace(config, model=report.stack.model))
    totals = RunTotals()
    with LLM.from_built(build_engine(registry, config, loaded)) as llm:
        llm.engine.observers.add(totals)
        begun = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begun
    made = [output.outputs[0].token_ids for output in outputs]
    return Row(
        stack=report,
        tokens_per_second=sum(map(len, made)) / seconds,
        totals=totals,
        same=sum(tokens == list(wanted) for tokens, wanted in zip(made, expected, strict=True)),
        of=len(made),
    )
