"""In bf16, the native ops and kernel choose tokens that are no farther from the fp32 reference than rounding explains.

Greedy tokens in 16 bits differ between stacks at near-ties. So each is teacher-forced through the fp32 reference (naive kernel, torch's
ops): the share of tokens that are not its first choice, and the farthest of them, are compared with those of the naive kernel in the same
type, alone and batched. Its ops are torch's with the linears of `tests.matrix.widened`: the same rounding, in less time where the processor
has no bf16. `make lossy` takes OCTAVO_LOSSY_TOKENS of them, 10,240 by default.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from octavo.bench.ablation.agreement import Rounding
from octavo.bench.ablation.engines import Engines
from octavo.bench.ablation.forcing import score
from octavo.bench.drive import drive
from octavo.bench.work import Item, Work
from octavo.core.native import absence
from octavo.core.registry import Registry
from octavo.core.settings.config import EngineConfig, load_config
from octavo.core.sources import DEFAULT_MODEL, resolve
from octavo.core.text.tokenizer import Tokenizer
from tests.matrix.test_smollm2 import LICENSE
from tests.matrix.widened import WIDENED

TOKENS = int(os.environ.get("OCTAVO_LOSSY_TOKENS", "2560"))  # of 1,280 the naive kernel missed 4 on one thread and 12 on two
ANSWER = 160  # tokens
CONTEXT = 512
BATCH = 64

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]


def work_of(source: str, tokens: int) -> Work:
    """English out of the license: prompts of 16 to 64 tokens, and of 200 to 300, whose answers the processor's tiles have a part in."""
    ids = Tokenizer.from_folder(resolve(source, report=print).path).encode(LICENSE.read_text())
    rng = random.Random(7)
    items = []
    for number in range(-(-tokens // ANSWER)):
        length = rng.randint(200, 300) if number % 2 else rng.randint(16, 64)
        start = rng.randrange(len(ids) - length)
        items.append(Item(prompt=tuple(ids[start : start + length]), output_len=ANSWER))
    return Work(name="license", items=items)


@pytest.mark.skipif(absence() is not None, reason=str(absence()))
def test_native_tokens_are_as_near_as_naive_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """Rate up to chance, distance up to a factor of two: the rule of `octavo ablate`, for the model that is the default.

    Rates are compared of the same prompts, alone with alone and batched with batched. The distance is the greatest that the naive kernel
    shows in either: the few tokens that run alone may miss what rounding can do.
    """
    registry = Registry.discover(environ={"OCTAVO_NO_PLUGINS": "1"})
    registry.add(WIDENED)
    engines = Engines(registry)
    work = work_of(DEFAULT_MODEL, TOKENS)
    few = Work(name="license", items=work.items[: max(1, len(work.items) // 8)])

    def config(kernel: str, ops: str) -> EngineConfig:
        overrides = {
            "model": {"source": DEFAULT_MODEL},
            "kernel": {"plugin": kernel},
            "ops": {"plugin": ops},
            "scheduler": {"plugin": "chunked", "max_num_seqs": BATCH},
            "allocator": {"plugin": "paged"},
            "engine": {"device": "cpu", "dtype": "bfloat16", "max_model_len": CONTEXT, "num_kv_slots": BATCH * CONTEXT},
        }
        return load_config(registry, environ={}, overrides=overrides)

    def rounding(given: EngineConfig, some: Work, concurrency: int) -> Rounding:
        with engines.open(given) as built:
            records = drive(built.engine, some, concurrency=concurrency)
        assert all(record.succeeded for record in records)
        pairs = [(item.prompt, record.token_ids) for item, record in zip(some.items, records, strict=True)]
        with engines.open(engines.reference(given, max_model_len=CONTEXT)) as reference:
            return Rounding.of(score(reference.engine, pairs))

    native, naive = config("cpu_paged", "cpu"), config("naive", WIDENED.name)
    found = {
        "native, batched": rounding(native, work, BATCH),
        "native, alone": rounding(native, few, 1),
        "naive, batched": rounding(naive, work, BATCH),
        "naive, alone": rounding(naive, few, 1),
    }
    with capsys.disabled():
        for name, one in found.items():
            print(f"\n{name}: {one}")
    farthest = max(found["naive, batched"].farthest, found["naive, alone"].farthest)
    for how, some in (("batched", work), ("alone", few)):
        assert found[f"native, {how}"].tokens == found[f"naive, {how}"].tokens == len(some.items) * ANSWER
        assert found[f"native, {how}"].within(replace(found[f"naive, {how}"], farthest=farthest)), how
