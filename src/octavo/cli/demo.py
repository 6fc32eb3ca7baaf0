"""`octavo demo`: one real answer, then every installed stack on the same prompts."""

from __future__ import annotations

import argparse
from typing import Any

from tqdm import tqdm

from octavo.bench.stack_table import Row, compare_stacks, reference_tokens
from octavo.cli import COMMANDS
from octavo.cli.settings import add_config_arguments, config_from, say
from octavo.core.assembly import build_engine, load_model
from octavo.core.compat import reports
from octavo.core.errors import RequestError
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.llm import LLM

QUESTION = "What is the capital of France?"
# Of different lengths, and so are their continuations: a static batch has to wait for its longest member.
PROMPTS = {
    "The capital of France is": 8,
    "def fibonacci(n):\n": 40,
    "Water boils at": 12,
    "Once upon a time, in a village between two rivers, there lived a miller who": 32,
    "1, 1, 2, 3, 5, 8,": 16,
    "A good way to learn a language is to": 24,
    "대한민국의 수도는": 12,
    "The three primary colours are": 48,
}
MAX_MODEL_LEN = 512
POOL_SLOTS = 1024  # the same for every stack: two whole contexts, or a block for everybody


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("demo", help=COMMANDS["demo"], description=COMMANDS["demo"])
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the answer and the table. Returns 1 if a stack that runs gave other tokens than transformers."""
    registry = Registry.discover()
    args.settings = [
        f"engine.max_model_len={MAX_MODEL_LEN}",
        f"engine.num_kv_slots={POOL_SLOTS}",
        f"scheduler.max_num_seqs={len(PROMPTS)}",
        "engine.dtype=float32",
        *args.settings,
    ]
    config = config_from(args, registry)
    loaded = load_model(registry, config, report=say)
    print(f"\n> {QUESTION}")
    with LLM.from_built(build_engine(registry, config, loaded, report=say)) as llm:
        for piece in llm.stream([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=48)):
            print(piece.outputs[0].text, end="", flush=True)
    print("\n")

    if loaded.tokenizer is None:
        raise RequestError(f"{loaded.source.path} has no tokenizer.json, which the demo's prompts need", field="prompt")
    prompts, lengths = [loaded.tokenizer.encode(text) for text in PROMPTS], list(PROMPTS.values())
    reference = reference_tokens(loaded, prompts, lengths)
    expected = list(tqdm(reference, total=len(prompts), desc="transformers generate, for comparison", unit="prompt"))
    total = len(list(reports(registry, loaded.source.config, device="cpu", dtype="float32", kv_dtype="float32")))
    rows: list[Row] = []
    comparison = compare_stacks(registry, config, loaded, prompts=prompts, lengths=lengths, expected=expected)
    for row in tqdm(comparison, total=total, desc="stacks", unit="stack"):
        rows.append(row)
    print(
        f"\n{len(PROMPTS)} prompts, {sum(lengths)} tokens out, in fp32; every stack has a KV pool of {POOL_SLOTS} slots and "
        f"max_model_len {MAX_MODEL_LEN}.\nOne run each, no benchmark. `same`: prompts whose tokens equal transformers' generate.\n"
    )
    print(table(rows))
    runs = [row for row in rows if not row.problem]
    different = [row for row in runs if row.same != row.of]
    print(f"\n{len(runs)} of {len(rows)} stacks run; {len(runs) - len(different)} of them give the same tokens.")
    return 1 if different or not runs else 0


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    head = ("stack", "tok/s", "steps", "mean batch", "peak slots", "preempted", "same")
    cells = [head]
    for row in rows:
        if row.totals is not None:
            t = row.totals
            figures = (f"{row.tokens_per_second:.1f}", str(t.steps), f"{t.mean_batch:.2f}", str(t.peak_slots), str(t.preemptions))
            cells.append((str(row.stack.stack), *figures, f"{row.same}/{row.of}"))
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    for row in rows:
        if row.totals is None:
            fixes = ", or ".join(f'{change.kind} = "{change.name}"' for change in row.stack.changes)
            lines.append(f"{row.stack.stack}: does not run: {row.problem}{f'; would run with {fixes}' if fixes else ''}")
    return "\n".join(lines)
