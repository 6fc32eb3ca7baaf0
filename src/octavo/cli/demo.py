"""`octavo demo`: one real answer, then every installed stack on the same prompts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from octavo.cli import COMMANDS
from octavo.cli.settings import add_config_arguments, config_from, say
from octavo.core.errors import RequestError
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.settings.config import EngineConfig

if TYPE_CHECKING:
    from octavo.bench.stack_table import Row
    from octavo.core.assembly import LoadedModel

QUESTION = "What is the capital of France?"
# Of different lengths; each is continued by as many tokens, so that all stacks have the same work in a short time.
PROMPTS = (
    "The capital of France is",
    "A good way to learn a language is to",
    "Once upon a time, in a village between two rivers, there lived a miller who",
    "대한민국의 수도는",
)
NEW_TOKENS = 16
MAX_MODEL_LEN = 256
POOL_SLOTS = 512  # the same for every stack: two whole contexts, or blocks for all prompts


GO_ON = """Go on with:
  octavo chat                                       a conversation
  octavo generate "Once upon a time" --max-tokens 40
  octavo stacks --explain                           which stacks run, and why the others don't"""


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("demo", help=COMMANDS["demo"], description=COMMANDS["demo"])
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the answer and the table. Returns 1 if a stack broke or gave other tokens than transformers, or none runs."""
    registry = Registry.discover()
    args.settings = [
        f"engine.max_model_len={MAX_MODEL_LEN}",
        f"engine.num_kv_slots={POOL_SLOTS}",
        f"scheduler.max_num_seqs={len(PROMPTS)}",
        "engine.dtype=float32",
        *args.settings,
    ]
    config = config_from(args, registry)
    from octavo.core.assembly import load_model  # imports torch: not before the settings are known to be right

    loaded = load_model(registry, config, report=say)
    _answer(registry, config, loaded)
    rows = _compare(registry, config, loaded)
    facts, engine = loaded.facts, config.engine
    pool = f"{engine.num_kv_slots} slots" if engine.num_kv_slots else f"{engine.kv_cache_memory} bytes"
    print(
        f"\n{len(PROMPTS)} prompts, {NEW_TOKENS} tokens out for each (EOS ignored), in {facts.dtype} on {facts.device}; "
        f"every stack has a KV pool of {pool} and max_model_len {engine.max_model_len}.\n"
        "One run, no benchmark: answers of one length end together, so no row of a static batch waits for a longer one here.\n"
        "`same`: prompts whose tokens equal those of transformers' generate, in fp32.\n"
    )
    print(table(rows))
    runs = [row for row in rows if row.totals is not None]
    right = [row for row in runs if row.same == row.of]
    print(f"\n{len(runs)} of {len(rows)} stacks run; {len(right)} of them give the same tokens.\n\n{GO_ON}")
    return 0 if runs and len(right) == len(runs) and not any(row.failed for row in rows) else 1


def _answer(registry: Registry, config: EngineConfig, loaded: LoadedModel) -> None:
    """Ask the question and print the answer as it comes."""
    from octavo.core.assembly import build_engine
    from octavo.llm import LLM

    with LLM.from_built(build_engine(registry, config, loaded, report=say)) as llm:
        print(f"\n> {QUESTION}", flush=True)
        for piece in llm.stream([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=48)):
            print(piece.outputs[0].text, end="", flush=True)
    print("\n", flush=True)


def _compare(registry: Registry, config: EngineConfig, loaded: LoadedModel) -> list[Row]:
    """Run the prompts on transformers, then on every stack."""
    from octavo.bench.stack_table import compare_stacks, installed_stacks, reference_tokens

    if loaded.tokenizer is None:
        raise RequestError(f"{loaded.source.path} has no tokenizer.json, which the demo's prompts need", field="prompt")
    prompts, lengths = [loaded.tokenizer.encode(text) for text in PROMPTS], [NEW_TOKENS] * len(PROMPTS)
    say("transformers loads the model too, to compare with")
    reference = reference_tokens(loaded, prompts, lengths)
    expected = list(tqdm(reference, total=len(prompts), desc="transformers' generate", unit="prompt"))
    comparison = compare_stacks(registry, config, loaded, prompts=prompts, lengths=lengths, expected=expected)
    return list(tqdm(comparison, total=len(installed_stacks(registry, loaded)), desc="stacks", unit="stack"))


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, then the stacks without figures by reason, with what would mend it."""
    cells = [("stack", "tok/s", "steps", "mean batch", "idle rows", "peak slots", "preempted", "same")]
    without: dict[str, list[str]] = {}
    for row in rows:
        if row.totals is None:
            fixes = ", or ".join(f'{change.kind} = "{change.name}"' for change in row.stack.changes)
            reason = f"{'FAILED' if row.failed else 'Does not run'}: {row.problem}{f'; would run with {fixes}' if fixes else ''}"
            without.setdefault(reason, []).append(str(row.stack.stack))
        else:
            t = row.totals
            same = f"{row.same}/{row.of}" + (f" ({row.ties} tied)" if row.ties else "")
            counts = (str(t.steps), f"{t.mean_batch:.2f}", str(t.idle_rows), str(t.peak_slots), str(t.preemptions))
            cells.append((str(row.stack.stack), f"{row.tokens_per_second:.1f}", *counts, same))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    for reason, stacks in without.items():
        lines += ["", reason, *(f"  {stack}" for stack in stacks)]
    return "\n".join(lines)
