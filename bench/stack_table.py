"""Every installed stack on the same prompts: does it run, how, and are the tokens the same?

One run a stack, all around one loaded model, one pool size and one limit of sequences: a look at what differs, no benchmark. The tokens
are compared with those of transformers' `generate`, one prompt at a time. A first difference where transformers' two likeliest tokens
are nearer than TIE is a tie, which rounding decides, and counts as the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from octavo.bench.run_totals import RunTotals
from octavo.core.assembly import LoadedModel, build_engine, load_model
from octavo.core.compat import EXCHANGEABLE, StackReport, reports
from octavo.core.errors import ConfigError
from octavo.core.options import SchedulerOptions
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import EngineConfig
from octavo.core.sources.quiet import without_progress_bars
from octavo.core.stack import Choice
from octavo.llm import LLM

TIE = 1e-4  # distance of logits


@dataclass(frozen=True, slots=True)
class Reference:
    """What should come out for a prompt."""

    token_ids: list[int]
    gaps: list[float]  # for each token: by how much its logit led the next best


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stack: its figures, or in `problem` why it has none. `failed`: not since it cannot run here, but since something broke."""

    stack: StackReport
    problem: str = ""
    failed: bool = False
    tokens_per_second: float = 0.0
    totals: RunTotals | None = None
    same: int = 0  # prompts whose tokens equal the reference, ties included
    ties: int = 0
    of: int = 0


def reference_tokens(loaded: LoadedModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Iterator[Reference]:
    """Greedy tokens of each prompt alone, by transformers in fp32 on the CPU; yields a prompt's as soon as they are known."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with without_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(loaded.source.path, dtype=torch.float32)
    model.generation_config = GenerationConfig()  # nothing of the model's own: plain greedy, past EOS too
    for prompt, length in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(made.logits).topk(2).values
        yield Reference(made.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


def compare_stacks(
    registry: Registry,
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    expected: Sequence[Reference],
) -> Iterator[Row]:
    """Run each stack in turn; yields a row as soon as it is known.

    `prompts` are token ids, `lengths` how many tokens each is continued by (EOS ignored), `expected` what should come out. Plugins have
    their default options, but those that `config` chooses are as it sets them, and max_num_seqs is everybody's.
    """
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    for report in installed_stacks(registry, loaded):
        if not report.runs:
            yield Row(stack=report, problem="; ".join(report.problems))
            continue
        of_stack = _with_stack(config, report)
        try:
            if (report.stack.model.name, report.stack.ops.name) != (loaded.choice.name, loaded.ops.name):
                loaded = load_model(registry, of_stack, source=loaded.source)
            yield _run(registry, of_stack, loaded, report, prompts, params, expected)
        except ConfigError as error:
            yield Row(stack=report, problem=str(error))
        except Exception as error:  # a plugin may raise anything; the others still have their turn
            yield Row(stack=report, problem=f"{type(error).__name__}: {error}", failed=True)


def installed_stacks(registry: Registry, loaded: LoadedModel) -> list[StackReport]:
    """Every stack for the loaded model on its device; those that share a model plugin and ops, and so its weights, next to each other."""
    facts = loaded.facts
    found = reports(registry, loaded.source.config, device=facts.device, dtype=facts.dtype, kv_dtype=facts.kv_dtype)
    return sorted(found, key=lambda report: (report.stack.model.name, report.stack.ops.name))


def _with_stack(config: EngineConfig, report: StackReport) -> EngineConfig:
    parts: dict[str, Choice] = {}
    for kind in ("model", *EXCHANGEABLE):
        default, configured = getattr(report.stack, kind), cast("Choice | None", getattr(config, kind))
        parts[kind] = configured if configured is not None and configured.name == default.name else default
    seqs = cast(SchedulerOptions, config.scheduler.options).max_num_seqs
    scheduler = replace(parts["scheduler"], options=parts["scheduler"].options.model_copy(update={"max_num_seqs": seqs}))
    return replace(config, **cast(Any, {**parts, "scheduler": scheduler}))


def _run(
    registry: Registry,
    config: EngineConfig,
    loaded: LoadedModel,
    report: StackReport,
    prompts: Sequence[Sequence[int]],
    params: list[SamplingParams],
    expected: Sequence[Reference],
) -> Row:
    totals = RunTotals()
    with LLM.from_built(build_engine(registry, config, loaded)) as llm:
        llm.engine.observers.add(totals)
        clock = llm.engine.clock
        begun = clock.now()
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        seconds = clock.now() - begun
    made = [output.outputs[0].token_ids for output in outputs]
    same = sum(tokens == wanted.token_ids for tokens, wanted in zip(made, expected, strict=True))
    ties = sum(_differ_at_tie(tokens, wanted) for tokens, wanted in zip(made, expected, strict=True))
    return Row(
        stack=report,
        tokens_per_second=sum(map(len, made)) / seconds,
        totals=totals,
        same=same + ties,
        ties=ties,
        of=len(made),
    )


def _differ_at_tie(tokens: Sequence[int], wanted: Reference) -> bool:
    pairs = zip(tokens, wanted.token_ids, strict=True)
    first = next((index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    return first is not None and wanted.gaps[first] < TIE
