"""Runs an ablation: every cell in every scenario, interleaved, with the same work in each repeat, and each run kept as it ends.

For each run a fresh engine is built around the shared model and warmed up; its cache is emptied then. Garbage is collected before the
clock runs and not while it does. After each repeat the tokens are compared, and nothing more is measured once they differ.
Must not know: plugins by name, how results are shown.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from octavo.bench.ablation.agreement import Outputs
from octavo.bench.ablation.breakdown import break_down
from octavo.bench.ablation.cells import Cell
from octavo.bench.ablation.claims import check_claims
from octavo.bench.ablation.engines import Engines
from octavo.bench.ablation.measures import find_measure
from octavo.bench.ablation.preparation import prepare
from octavo.bench.ablation.result import AblationResult, run_folder
from octavo.bench.ablation.schedule import order
from octavo.bench.ablation.spec import AGAIN, AblationSpec
from octavo.bench.ablation.verification import Verifier
from octavo.bench.ablation.works import scenario_work
from octavo.bench.drive import drive
from octavo.bench.identity import differences, identify
from octavo.bench.interrupts import RunFailed
from octavo.bench.runs import Run
from octavo.bench.step_log import StepLog
from octavo.bench.work import Work
from octavo.core.assembly import BuiltEngine
from octavo.core.errors import ResultError
from octavo.core.garbage import collecting_no_garbage

Told = Callable[[str, int, int], object]
"""(what is being done, requests that are over, requests in all; 0 while that is unknown)."""

WARMUP_SEED = 1_000_000  # of work that no repeat has
WARMUP_TOKENS = 4
REFERENCE_SHARE = 0.1  # of the time of a repeat's runs, that putting baselines to the reference may take in each further repeat
SAME = ("versions", "model_revision", "device", "driver", "cpu", "cores", "threads")  # of an Identity, in all runs of an ablation


def run_ablation(engines: Engines, spec: AblationSpec, folder: str | Path, *, resume: bool = False, told: Told) -> AblationResult:
    """Run what is missing in `folder` (all, unless `resume`) and keep it there. Ctrl-C returns what there is, not `finished`.

    Raises ConfigError and its children before anything is measured; a run that breaks is listed in the result.
    """
    result = AblationResult.load(folder) if resume else AblationResult(spec=spec)
    ablation = _Ablation(engines, result, Path(folder), told)
    ablation.prepare()
    try:
        result.finished = ablation.run()
    except KeyboardInterrupt:
        result.finished = False
    result.save(folder)
    return result


class _Ablation:
    def __init__(self, engines: Engines, result: AblationResult, folder: Path, told: Told) -> None:
        self.engines = engines
        self.result = result
        self.spec = result.spec
        self.folder = folder
        self.told = told
        self.cells: dict[str, list[Cell]] = {}  # that run, by scenario
        self.over = 0
        self.total = 0
        self.found: dict[str, dict[str, Outputs]] = {}  # of the tokens compared since this began, by scenario and cell
        self.compared: dict[str, list[int]] = {}  # repeats of which they are
        self.referenced: dict[str, list[int]] = {}  # of these, where baselines were put to the reference
        self.reference_is_dear: dict[str, bool] = {}  # by scenario: it took more than its share

    def prepare(self) -> None:
        """Find every mistake that can be found before the first run."""
        for name in self.spec.compared:
            find_measure(name)
        check_claims(self.spec)
        for scenario in self.spec.scenarios:
            self.told(f"preparing {scenario}", 0, 0)
            self.cells[scenario], self.result.cells[scenario] = prepare(self.engines, self.spec, scenario)
            work = self._work(scenario, 0)
            self._check_device(scenario, work)
            runs = self.spec.repeats * len(self.cells[scenario]) + sum(not cell.name.endswith(AGAIN) for cell in self.cells[scenario])
            self.total += runs * len(work.items)
        self.result.save(self.folder)

    def _check_device(self, scenario: str, work: Work) -> None:
        """What is resumed must go on where it began."""
        before = next((run.identity for run in self.result.runs.values() if run.identity is not None), None)
        if before is None:
            return
        with self.engines.open(self.cells[scenario][0].config) as built:
            now = identify(built, work)
        if changed := differences(before, now, SAME):
            raise ResultError(f"{self.folder} was begun with something else, and cannot go on here: {'; '.join(changed)}")

    def run(self) -> bool:
        """All repeats. False where it ended early since tokens differ."""
        for repeat in range(self.spec.repeats):
            for scenario, cells in self.cells.items():
                by_name = {cell.name: cell for cell in cells}
                work = self._work(scenario, repeat)
                for name in order(list(by_name), repeat):
                    self._cell(scenario, by_name[name], repeat, work)
                self._verify(scenario, repeat, work)
                self.result.save(self.folder)
            if not all(outputs.agree for found in self.found.values() for outputs in found.values()):
                return False
        for scenario, cells in self.cells.items():
            for cell in cells:
                self._break_down(scenario, cell)
        return True

    def _break_down(self, scenario: str, cell: Cell) -> None:
        """One more run of each cell, with timers, which is not among those that are compared."""
        if cell.name.endswith(AGAIN):
            return
        runs, known = self.result.of(scenario, cell.name), self.result.breakdowns.setdefault(scenario, {})
        load, where = self.spec.scenarios[scenario].load, f"{scenario}/{cell.name}/parts"
        work, before, text = self._work(scenario, 0), self.over, f"{scenario}: the parts of {cell.name}'s steps"
        if cell.name not in known and runs:
            self.told(text, self.over, self.total)
            try:
                known[cell.name] = break_down(
                    self.engines,
                    cell.config,
                    work,
                    load=load,
                    warm_up=lambda built: self._warm_up(built, scenario),
                    progress=lambda record: self._ended(text),
                    runs=runs,
                )
            except Exception as error:
                self.result.broken[where] = f"{type(error).__name__}: {error}"
            else:
                self.result.broken.pop(where, None)
            self.result.save(self.folder)
        self.over = before + len(work.items)
        self.told(text, self.over, self.total)

    # -------------------------------------------------------------------- one run

    def _cell(self, scenario: str, cell: Cell, repeat: int, work: Work) -> None:
        key, where = (scenario, cell.name, repeat), f"{scenario}/{cell.name}/{repeat}"
        before = self.over
        if key not in self.result.runs:
            self.result.broken.pop(where, None)
            shutil.rmtree(run_folder(self.folder, key, among="broken"), ignore_errors=True)
            self.told(self._text(scenario, cell.name, repeat), self.over, self.total)
            try:
                with self.engines.open(cell.config) as built:
                    self.result.add(self.folder, key, self._measure(built, scenario, cell, repeat, work))
            except RunFailed as failure:
                self.result.broken[where] = str(failure)
            except Exception as error:
                self.result.broken[where] = f"{type(error).__name__}: {error}"
        self.over = before + len(work.items)

    def _measure(self, built: BuiltEngine, scenario: str, cell: Cell, repeat: int, work: Work) -> Run:
        engine, load, text = built.engine, self.spec.scenarios[scenario].load, self._text(scenario, cell.name, repeat)
        self._warm_up(built, scenario)
        engine.kv.reset()
        identity, meter = identify(built, work), self.engines.meter(cell.config)
        meter.begin(built)
        run = Run(work=work, records=[], identity=identity, settings=load.model_dump(mode="json", exclude_none=True))
        gc.collect()
        with collecting_no_garbage():
            log = StepLog(engine.clock.now())
            with log.watching(engine):
                try:
                    run.records = drive(
                        engine,
                        work,
                        concurrency=load.concurrency,
                        zero=log.zero,
                        timeout_s=load.timeout_s,
                        progress=lambda record: self._ended(text),
                    )
                except RunFailed as failure:
                    run.records, run.complete, run.failed, run.stopped_by = failure.records, False, True, str(failure)
                    run.steps = log.lines
                    run.save(run_folder(self.folder, (scenario, cell.name, repeat), among="broken"))
                    raise
        run.steps, run.memory = log.lines, meter.table(built.pool)
        return run

    def _warm_up(self, built: BuiltEngine, scenario: str) -> None:
        """A few short answers to other prompts: threads start, kernels are compiled, memory is touched."""
        work = self._work(scenario, WARMUP_SEED)
        items = [replace(item, at=0.0, pause=0.0, output_len=min(WARMUP_TOKENS, item.output_len)) for item in work.items]
        if self.spec.warmup:
            drive(built.engine, replace(work, items=items[: self.spec.warmup]), concurrency=self.spec.warmup)

    def _work(self, scenario: str, repeat: int) -> Work:
        config = self.cells[scenario][0].config
        loaded = self.engines.loaded(config)
        return scenario_work(
            self.spec.scenarios[scenario],
            scenario,
            seed=self.spec.seed + repeat,
            vocab_size=loaded.shape.vocab_size,
            max_model_len=config.engine.max_model_len or loaded.shape.max_position_embeddings,
            encode=None if loaded.tokenizer is None else loaded.tokenizer.encode,
        )

    def _text(self, scenario: str, cell: str, repeat: int) -> str:
        return f"{scenario}: {cell} {repeat + 1}/{self.spec.repeats}"

    def _ended(self, text: str) -> None:
        """One more request is over."""
        self.over += 1
        self.told(text, self.over, self.total)

    # --------------------------------------------------------------------- tokens

    def _verify(self, scenario: str, repeat: int, work: Work) -> None:
        """Compare what this repeat's runs gave; a cell whose run or one of whose ancestors' runs broke is not compared."""
        records = {cell.name: run.records for cell in self.cells[scenario] if (run := self.result.runs.get((scenario, cell.name, repeat)))}
        cells: list[Cell] = []
        for cell in self.cells[scenario]:  # parents come first
            if cell.name in records and (cell.parent is None or any(cell.parent == other.name for other in cells)):
                cells.append(cell)
        if not cells:
            return
        load = self.spec.scenarios[scenario].load
        say = lambda text: self.told(f"{scenario}: comparing tokens, {text}", self.over, self.total)  # noqa: E731
        baselines = repeat == 0 or not self.reference_is_dear.get(scenario, False)
        with Verifier(self.engines, cells, concurrency=load.concurrency, say=say) as verifier:
            found = verifier.check(work, records) if repeat == 0 else verifier.check_again(work, records, baselines=baselines)
        known, compared = self.found.setdefault(scenario, {}), self.compared.setdefault(scenario, [])
        for name, outputs in found.items():
            known[name] = known[name].joined(outputs) if name in known else outputs
        compared.append(repeat)
        referenced = self.referenced.setdefault(scenario, [])
        if any(cell.parent is None and cell.name in found and found[cell.name].exact is not None for cell in cells):
            referenced.append(repeat)
            ran = sum(run.duration for (s, _, r), run in self.result.runs.items() if (s, r) == (scenario, repeat))
            self.reference_is_dear[scenario] = verifier.reference_s > REFERENCE_SHARE * ran
        # What an earlier start has compared stands until as much is compared anew, or something differs.
        if set(self.result.compared.get(scenario, ())) <= set(compared) or not all(outputs.agree for outputs in known.values()):
            self.result.outputs[scenario], self.result.compared[scenario] = dict(known), list(compared)
            self.result.referenced[scenario] = list(referenced)
