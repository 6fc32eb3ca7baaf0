"""Two stacks, the same prompts, the same pool: what changes when one part does? Run it with `python docs/tutorial/first_comparison.py`."""

import sys
import time

from octavo import LLM, SamplingParams
from octavo.bench.run_totals import RunTotals

PROMPTS = [
    f"{topic} is"
    for topic in ("The sea", "Iron", "A river", "Paris", "The moon", "Bread", "Music", "A map", "Glass", "Winter", "Tea", "Sand")
]
LENGTHS = [8, 64, 16, 24, 8, 48, 12, 96, 16, 8, 32, 20]  # tokens that each prompt is continued by


def run(model: str, **stack: str) -> tuple[list[list[int]], RunTotals, float]:
    """The tokens, the steps in numbers, and the seconds."""
    totals = RunTotals()
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in LENGTHS]
    with LLM(model=model, dtype="float32", max_model_len=128, max_num_seqs=4, num_kv_slots=512, **stack) as llm:
        llm.engine.observers.add(totals)
        begun = time.perf_counter()
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], totals, time.perf_counter() - begun


def main(model: str) -> None:
    """Compare static with continuous batching; everything else stays."""
    static = run(model, scheduler="static", allocator="paged")
    continuous = run(model, scheduler="continuous", allocator="paged")
    print(f"{'':12}{'steps':>8}{'mean batch':>12}{'idle rows':>11}{'peak slots':>12}{'seconds':>9}")
    for name, (_, totals, seconds) in {"static": static, "continuous": continuous}.items():
        print(f"{name:12}{totals.steps:>8}{totals.mean_batch:>12.2f}{totals.idle_rows:>11}{totals.peak_slots:>12}{seconds:>9.1f}")
    print("the same tokens:", static[0] == continuous[0])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
