"""Whether the cells of a scenario give the same tokens: what is run for that besides the repeats, and what is compared with what.

In fp32 the repeats' own answers are compared. A cell that ran in 16 bits is run once more in fp32 for that, with the first repeat's work,
and its 16-bit answers are teacher-forced through the fp32 reference beside those of kernel `naive` and ops `torch` in the same type, in
each repeat. A baseline, which has no parent, is compared with the reference itself: in the first repeat, and again in a further one if
that is asked for, since where prompts are long the reference takes as long as a cell does.
Must not know: files, how results are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from octavo.bench.ablation.agreement import Agreement, Divergence, Lossy, Outputs, Rounding, compare
from octavo.bench.ablation.cells import Cell
from octavo.bench.ablation.engines import Engines
from octavo.bench.ablation.forcing import Scores, perplexity, score
from octavo.bench.drive import drive
from octavo.bench.records import RequestRecord
from octavo.bench.work import Work, prompt_of
from octavo.core.errors import ConfigError
from octavo.core.settings.config import EngineConfig
from octavo.core.stack import Choice

Records = Sequence[RequestRecord]


class Verifier:
    """Of one scenario. Use it in a `with` block: the reference engine lives as long. `say` is told what is being checked."""

    def __init__(
        self, engines: Engines, cells: Sequence[Cell], *, concurrency: int | None, say: Callable[[str], object] = lambda text: None
    ) -> None:
        self._engines = engines
        self._cells = {cell.name: cell for cell in cells}
        self._concurrency = concurrency
        self._say = say
        self._open = ExitStack()
        self.reference_s = 0.0  # that the reference has taken for fp32 baselines

    def __enter__(self) -> Self:
        some = next(iter(self._cells.values())).config
        length = some.engine.max_model_len or self._engines.loaded(some).shape.max_position_embeddings
        built = self._open.enter_context(self._engines.open(self._engines.reference(some, max_model_len=length)))
        self._reference = built.engine
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def check(self, work: Work, measured: Mapping[str, Records]) -> dict[str, Outputs]:
        """By cell, from the measured records of one repeat (all cells, the same work): everything that is compared."""
        exact = {name: self._in_fp32(name, work, measured[name]) for name in self._cells}
        return {name: Outputs(exact=self._exact(name, work, exact), lossy=self._lossy(name, work, measured)) for name in self._cells}

    def check_again(self, work: Work, measured: Mapping[str, Records], *, baselines: bool) -> dict[str, Outputs]:
        """Of a further repeat, what needs no run of a cell: fp32 where it and its parent computed in it, and the 16-bit answers.

        `baselines`: those in fp32 by the reference, too.
        """
        exact = [
            name for name, cell in self._cells.items() if self.is_exact(name) and (self.is_exact(cell.parent) if cell.parent else baselines)
        ]
        found = {name: Outputs(exact=self._exact(name, work, measured)) for name in exact}
        for name in self._cells:
            if not self.is_exact(name):
                found[name] = Outputs(exact=None, lossy=self._lossy_again(name, work, measured))
        return found

    # --------------------------------------------------------------------- fp32

    def is_exact(self, name: str) -> bool:
        """The cell computes in fp32."""
        facts = self._engines.loaded(self._cells[name].config).facts
        return facts.dtype == facts.kv_dtype == "float32"

    def _in_fp32(self, name: str, work: Work, measured: Records) -> Records | None:
        """The cell's records in fp32: as measured, or of a run for this. None: its plugins do not run in fp32."""
        if self.is_exact(name):
            return measured
        self._say(f"{name} in fp32")
        return self._run(_in_fp32(self._cells[name].config), work)

    def _run(self, config: EngineConfig, work: Work, *, concurrency: int | None = None) -> Records | None:
        try:
            with self._engines.open(config) as built:
                return drive(built.engine, work, concurrency=concurrency or self._concurrency)
        except ConfigError:
            return None

    def _exact(self, name: str, work: Work, records: Mapping[str, Records | None]) -> Agreement | None:
        mine, parent = records[name], self._cells[name].parent
        if mine is None:
            return None
        if parent is None:
            self._say(f"{name} by the fp32 reference")
            begun = self._reference.clock.now()
            forced = self._forced(work, mine)
            self.reference_s += self._reference.clock.now() - begun
            return forced
        expected = records[parent]
        return None if expected is None else compare(work, expected, mine, distance=self._distance)

    def _distance(self, context: Sequence[int], token: int) -> float:
        return score(self._reference, [(context, [token])])[0].distances[0]

    def _forced(self, work: Work, records: Records) -> Agreement:
        """A baseline's answers against the reference's choice in each place; of each answer the first token that is not it."""
        divergences = []
        answered = [record for record in records if record.succeeded]
        for record, scores in zip(answered, self._scored(work, records), strict=True):
            for position, distance in enumerate(scores.distances):
                if distance > 0:
                    got = record.token_ids[position]
                    divergences.append(
                        Divergence(index=record.index, seed=work.seed, position=position, expected=-1, got=got, distance=distance)
                    )
                    if not divergences[-1].is_tie:
                        break
        off = {one.index for one in divergences}
        worst = [max((one for one in divergences if one.index == index), key=lambda one: one.distance) for index in sorted(off)]
        return Agreement(
            compared=len(answered), equal=len(answered) - len(off), divergences=tuple(worst), left_out=len(records) - len(answered)
        )

    # ------------------------------------------------------------------ 16 bits

    def _lossy(self, name: str, work: Work, measured: Mapping[str, Records]) -> Lossy | None:
        if self.is_exact(name):
            return None
        cell = self._cells[name]
        answers = {record.index: record.token_ids for record in measured[cell.parent or name] if record.succeeded}
        pairs = [(prompt_of(work, index, answers), tokens) for index, tokens in answers.items()]
        return replace(
            self._lossy_again(name, work, measured, naive=self._naive(cell.config, work, (1, None))),
            perplexity=self._perplexity(cell.config, pairs),
            parent_perplexity=self._perplexity(self._cells[cell.parent or name].config, pairs),
        )

    def _lossy_again(self, name: str, work: Work, measured: Mapping[str, Records], *, naive: Rounding | None = None) -> Lossy:
        """All but perplexities; unless `naive` is given, beside the naive kernel as it is batched alone."""
        cell, records = self._cells[name], measured[name]
        answers = {record.index: record.token_ids for record in measured[cell.parent or name] if record.succeeded}
        self._say(f"{name} by the fp32 reference")
        answered = [record for record in records if record.succeeded]
        here = {record.index for record in answered}
        return Lossy(
            rounding=Rounding.of(self._scored(work, records)),
            naive=naive or self._naive(cell.config, work, (None,)),
            same_answers=sum(answers.get(record.index) == record.token_ids for record in answered),
            answers=len(answered),
            left_out=len(records) - len(answered),
            lost=len(answers.keys() - here),
            parent_lost=len(here - answers.keys()),
            perplexity=math.nan,
            parent_perplexity=math.nan,
        )

    def _scored(self, work: Work, records: Records) -> list[Scores]:
        answers = {record.index: record.token_ids for record in records if record.succeeded}
        return score(self._reference, [(prompt_of(work, index, answers), tokens) for index, tokens in answers.items()])

    def _naive(self, config: EngineConfig, work: Work, loads: Sequence[int | None]) -> Rounding:
        """Kernel `naive` with ops `torch` in the cell's type, at such loads (None: as measured): what is more often not the reference.

        Not with the cell's own ops: what they do wrong would be in both rates.
        """
        self._say("the naive kernel in the same type")
        plain = (("kernel", "naive"), ("ops", "torch"))
        kernel, ops = (Choice.default(self._engines.registry.get(kind, name)) for kind, name in plain)
        naive = replace(config, kernel=kernel, ops=ops)
        found = [self._run(naive, work, concurrency=at_once) for at_once in loads]
        return max((Rounding.of(self._scored(work, records or [])) for records in found), key=lambda one: (one.rate, one.farthest))

    def _perplexity(self, config: EngineConfig, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
        with self._engines.open(config) as built:
            return perplexity(score(built.engine, pairs))


def _in_fp32(config: EngineConfig) -> EngineConfig:
    """As many slots, of twice the bytes."""
    memory = config.engine.kv_cache_memory
    doubled = None if memory is None else 2 * memory
    return replace(config, engine=config.engine.model_copy(update={"dtype": "float32", "kv_dtype": "auto", "kv_cache_memory": doubled}))
