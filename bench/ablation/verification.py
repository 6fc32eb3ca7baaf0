"""Whether the cells of a scenario give the same tokens: what is run for that besides the repeats, and what is compared with what.

In fp32 the repeats' own answers are compared. A cell that ran in 16 bits is run once more in fp32 for that, with the first repeat's work,
and its 16-bit answers are teacher-forced through the fp32 reference beside those of kernel `naive` and ops `torch` in the same type, in
each repeat. A baseline, which has no parent, is compared with the reference itself: in the first repeat, and again in a further one if
that is asked for, since where prompts are long the reference takes as long as a cell does.

A cell that quantises its weights otherwise than its parent computes with other numbers, and has other tokens in fp32 too: they are forced
through the reference with whole weights. All else is put to a reference whose weights are quantised as its own are.
Must not know: files, how results are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Self

from octavo.bench.ablation.agreement import Agreement, Divergence, Lossy, Outputs, Rounding, compare
from octavo.bench.ablation.cells import Cell
from octavo.bench.ablation.engines import Engines
from octavo.bench.ablation.forcing import Scores, perplexity, score
from octavo.bench.drive import drive
from octavo.bench.records import RequestRecord
from octavo.bench.work import Work, prompt_of
from octavo.core.engine import Engine
from octavo.core.errors import ConfigError
from octavo.core.settings.config import EngineConfig
from octavo.core.stack import Choice

Records = Sequence[RequestRecord]


class Verifier:
    """Of one scenario. Use it in a `with` block: reference engines live as long. `say` is told what is being checked."""

    def __init__(
        self, engines: Engines, cells: Sequence[Cell], *, concurrency: int | None, say: Callable[[str], object] = lambda text: None
    ) -> None:
        self._engines = engines
        self._cells = {cell.name: cell for cell in cells}
        self._concurrency = concurrency
        self._say = say
        self._open = ExitStack()
        self._references: dict[str | None, Engine] = {}  # by quantization of their weights
        self.reference_s = 0.0  # that references have taken for fp32 baselines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def check(self, work: Work, measured: Mapping[str, Records]) -> dict[str, Outputs]:
        """By cell, from the measured records of one repeat (all cells, the same work): everything that is compared."""
        exact = {name: self._in_fp32(name, work, measured[name]) for name in self._cells}
        return {name: Outputs(exact=self._exact(name, work, exact), lossy=self._lossy(name, work, measured)) for name in self._cells}

    def check_again(self, work: Work, measured: Mapping[str, Records], *, baselines: bool) -> dict[str, Outputs]:
        """Of a further repeat, what needs no run of a cell: fp32 where it and its parent computed in it, and the lossy answers.

        `baselines`: those in fp32 by the reference, too.
        """
        found = {}
        for name, cell in self._cells.items():
            if self.is_lossy(name):
                found[name] = Outputs(exact=None, lossy=self._lossy_again(name, work, measured))
            elif self.is_fp32(cell.parent) if cell.parent else baselines:
                found[name] = Outputs(exact=self._exact(name, work, measured))
        return found

    # --------------------------------------------------------------------- what a cell is

    def is_fp32(self, name: str) -> bool:
        """The cell computes in fp32."""
        facts = self._engines.loaded(self._cells[name].config).facts
        return facts.dtype == facts.kv_dtype == "float32"

    def is_requantized(self, name: str) -> bool:
        """Its weights are not quantised as its parent's are."""
        parent = self._cells[name].parent
        return parent is not None and self._quantization(name) != self._quantization(parent)

    def is_lossy(self, name: str) -> bool:
        """Its tokens may be others than its parent's."""
        return not self.is_fp32(name) or self.is_requantized(name)

    def _quantization(self, name: str) -> str | None:
        """The model plugin's option of that name; None: whole weights."""
        found: str | None = getattr(self._engines.loaded(self._cells[name].config).choice.options, "quantization", None)
        return found

    def _reference(self, quantization: str | None) -> Engine:
        """In fp32, with weights quantised like that; opened when it is first asked for."""
        if quantization not in self._references:
            config = next((cell.config for name, cell in self._cells.items() if self._quantization(name) == quantization), None)
            config = config or _whole(next(iter(self._cells.values())).config)
            length = config.engine.max_model_len or self._engines.loaded(config).shape.max_position_embeddings
            built = self._open.enter_context(self._engines.open(self._engines.reference(config, max_model_len=length)))
            self._references[quantization] = built.engine
        return self._references[quantization]

    # --------------------------------------------------------------------- fp32

    def _in_fp32(self, name: str, work: Work, measured: Records) -> Records | None:
        """The cell's records in fp32: as measured, or of a run for this. None: its plugins do not run in fp32."""
        if self.is_fp32(name):
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
        """By the parent's answers, or, of a baseline, by the reference. None: they are not to be the same, or one of them is missing."""
        mine, parent = records[name], self._cells[name].parent
        if mine is None or self.is_requantized(name):
            return None
        reference = self._reference(self._quantization(name))
        if parent is None:
            self._say(f"{name} by the fp32 reference")
            begun = reference.clock.now()
            forced = self._forced(reference, work, mine)
            self.reference_s += reference.clock.now() - begun
            return forced
        expected = records[parent]
        return None if expected is None else compare(work, expected, mine, distance=partial(_distance, reference))

    def _forced(self, reference: Engine, work: Work, records: Records) -> Agreement:
        """A baseline's answers against the reference's choice in each place; of each answer the first token that is not it."""
        divergences = []
        answered = [record for record in records if record.succeeded]
        for record, scores in zip(answered, _scored(reference, work, records), strict=True):
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

    # -------------------------------------------------------------------- lossy

    def _lossy(self, name: str, work: Work, measured: Mapping[str, Records]) -> Lossy | None:
        if not self.is_lossy(name):
            return None
        cell = self._cells[name]
        answers = {record.index: record.token_ids for record in measured[cell.parent or name] if record.succeeded}
        pairs = [(prompt_of(work, index, answers), tokens) for index, tokens in answers.items()]
        return replace(
            self._lossy_again(name, work, measured, loads=(1, None)),
            perplexity=self._perplexity(cell.config, pairs),
            parent_perplexity=self._perplexity(self._cells[cell.parent or name].config, pairs),
        )

    def _lossy_again(self, name: str, work: Work, measured: Mapping[str, Records], *, loads: Sequence[int | None] = (None,)) -> Lossy:
        """All but perplexities, beside the naive kernel at these loads; None: as measured."""
        cell, records = self._cells[name], measured[name]
        answers = {record.index: record.token_ids for record in measured[cell.parent or name] if record.succeeded}
        self._say(f"{name} by the fp32 reference")
        answered = [record for record in records if record.succeeded]
        here = {record.index for record in answered}
        reference = self._reference(None if self.is_requantized(name) else self._quantization(name))
        return Lossy(
            what=self._what(name),
            rounding=Rounding.of(_scored(reference, work, records)),
            naive=self._naive(reference, cell.config, work, loads),
            same_answers=sum(answers.get(record.index) == record.token_ids for record in answered),
            answers=len(answered),
            left_out=len(records) - len(answered),
            lost=len(answers.keys() - here),
            parent_lost=len(here - answers.keys()),
            perplexity=math.nan,
            parent_perplexity=math.nan,
        )

    def _what(self, name: str) -> str:
        """For which its tokens may be others, in words."""
        weights = [f"{self._quantization(name) or 'whole'} weights"] if self.is_requantized(name) else []
        return ", ".join([*weights, *([] if self.is_fp32(name) else ["16 bits"])])

    def _naive(self, reference: Engine, config: EngineConfig, work: Work, loads: Sequence[int | None]) -> Rounding:
        """Kernel `naive` with ops `torch` in the cell's type, at such loads (None: as measured): what is more often not the reference.

        Not with the cell's own ops: what they do wrong would be in both rates.
        """
        self._say("the naive kernel in the same type")
        plain = (("kernel", "naive"), ("ops", "torch"))
        kernel, ops = (Choice.default(self._engines.registry.get(kind, name)) for kind, name in plain)
        naive = replace(config, kernel=kernel, ops=ops)
        found = [self._run(naive, work, concurrency=at_once) for at_once in loads]
        return max((Rounding.of(_scored(reference, work, records or [])) for records in found), key=lambda one: (one.rate, one.farthest))

    def _perplexity(self, config: EngineConfig, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
        with self._engines.open(config) as built:
            return perplexity(score(built.engine, pairs))


def _scored(reference: Engine, work: Work, records: Records) -> list[Scores]:
    """Of each answer, in order."""
    answers = {record.index: record.token_ids for record in records if record.succeeded}
    return score(reference, [(prompt_of(work, index, answers), tokens) for index, tokens in answers.items()])


def _distance(reference: Engine, context: Sequence[int], token: int) -> float:
    """See `agreement.Distance`."""
    return score(reference, [(context, [token])])[0].distances[0]


def _in_fp32(config: EngineConfig) -> EngineConfig:
    """As many slots, of twice the bytes."""
    memory = config.engine.kv_cache_memory
    doubled = None if memory is None else 2 * memory
    return replace(config, engine=config.engine.model_copy(update={"dtype": "float32", "kv_dtype": "auto", "kv_cache_memory": doubled}))


def _whole(config: EngineConfig) -> EngineConfig:
    """Of a model plugin that quantises, with weights that are not."""
    model = config.model
    if model is None:
        return config
    return replace(config, model=replace(model, options=model.options.model_copy(update={"quantization": None})))
