"""What an ablation is to compare, as a TOML file writes it: scenarios, and cells that each change one part of their parent.

    name = "paged or not"
    repeats = 5
    [settings]                      # of every cell, sections as in a config file
    engine = { max_model_len = 1024, num_kv_slots = 2048, dtype = "float32" }
    scheduler = { max_num_seqs = 16 }
    [scenarios.lengths]             # every cell runs every scenario
    workload = { kind = "sharegpt-like", count = 32 }
    load = { concurrency = 16 }
    [cells.orca]
    preset = "orca"
    [cells.paged]
    parent = "orca"
    settings = { allocator = { plugin = "paged" } }

Must not know: engines, which plugins and workloads exist, torch.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator

from octavo.core.errors import InvalidOptionsError
from octavo.core.suggest import did_you_mean

Sections = dict[str, Any]
"""Settings as a config file has them: by section."""

AGAIN = " (again)"  # the first baseline a second time: the noise floor
NAME = r"^[A-Za-z0-9][A-Za-z0-9 ._=,()+-]*$"  # also a folder's name


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WorkloadSpec(_Strict):
    """A workload by name, and its sizes, which the workload itself checks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str = Field(description="one of octavo.bench.workloads.WORKLOADS")
    count: int = Field(32, ge=1, description="requests")

    @property
    def sizes(self) -> dict[str, Any]:
        """The options of its own."""
        return dict(self.model_extra or {})


class LoadSpec(_Strict):
    """How requests arrive: so many at once (closed loop), or at a rate (open loop). Neither: at the workload's own times."""

    concurrency: int | None = Field(None, ge=1, description="requests under way at once")
    rate: float | None = Field(None, gt=0, description="requests a second")
    burstiness: float = Field(
        1.0, gt=0, allow_inf_nan=True, description="shape of the gaps' gamma distribution; 1: Poisson, smaller: in bursts, inf: even gaps"
    )
    timeout_s: float | None = Field(None, gt=0, description="seconds after which a request ends with what it has, and counts as failed")

    @field_serializer("burstiness", when_used="json")
    def _written(self, burstiness: float) -> float | str:
        """JSON has no number for infinity; the word is read as it."""
        return "inf" if math.isinf(burstiness) else burstiness

    @model_validator(mode="after")
    def _one_loop(self) -> Self:
        if self.concurrency is not None and self.rate is not None:
            raise ValueError("concurrency is a closed loop and rate an open one; set one of them")
        if self.burstiness != 1.0 and self.rate is None:
            raise ValueError("burstiness shapes the gaps of an open loop; set rate too")
        return self


class ScenarioSpec(_Strict):
    """One workload under one load. `settings` hold for every cell in it."""

    workload: WorkloadSpec
    load: LoadSpec = LoadSpec()
    settings: Sections = Field(default_factory=dict)


class CellSpec(_Strict):
    """One stack. Without a parent it is a baseline, from a preset or from settings; with one it differs from it in `settings`."""

    parent: str | None = Field(None, description="the cell that this one is compared with")
    preset: str | None = Field(None, description="a named config (octavo presets) that it starts from")
    settings: Sections = Field(default_factory=dict, description="sections as in a config file")
    optional: bool = Field(False, description="left out, with the reason, where its plugins do not run on this device")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.parent is not None and self.preset is not None:
            raise ValueError("a cell starts from its parent or from a preset; set one of them")
        return self


class ClaimSpec(_Strict):
    """What must come out: a bound on the ratio of one measure of a cell to its parent's."""

    scenario: str
    cell: str
    measure: str
    at_least: float | None = Field(None, gt=0)
    at_most: float | None = Field(None, gt=0)
    of_bound: bool = Field(False, description="of the largest speed-up that the prefix hits allow, instead of the ratio itself")
    lost_at_most: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the parent's time that the cell may add outside of forward passes, in the same steps, or surely lose in all",
    )
    prefill_gaps_at_least: float | None = Field(
        None, ge=0, le=1, description="undecided unless the parent computed prompts in this share of the gaps between tokens"
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.lost_at_most is not None:
            if self.at_least is not None or self.at_most is not None or self.of_bound:
                raise ValueError("lost_at_most is a claim of its own: leave at_least, at_most and of_bound out")
        elif self.at_least is None and self.at_most is None:
            raise ValueError("set at_least, at_most or both, or lost_at_most")
        return self


class AblationSpec(_Strict):
    """All of it. Checked as far as it can be without plugins; `octavo.bench.ablation.cells` does the rest."""

    name: str = Field(pattern=NAME)
    summary: str = ""
    model: str = Field("smollm2-135m", description="folder, hub id, GGUF file or catalogue name")
    revision: str | None = None
    repeats: int = Field(5, ge=1, description="paired repeats; fewer than two give no intervals")
    seed: int = Field(0, ge=0, description="of the first repeat's work; the next one's is one more")
    warmup: int = Field(2, ge=0, description="requests that are run before each repeat and not counted")
    compared: tuple[str, ...] = Field(("output tok/s",), min_length=1, description="measures whose ratios are printed, the main one first")
    settings: Sections = Field(default_factory=dict, description="of every cell")
    scenarios: dict[str, ScenarioSpec] = Field(min_length=1)
    cells: dict[str, CellSpec] = Field(min_length=1)
    claims: tuple[ClaimSpec, ...] = Field((), description="what must come out; printed with whether it did")

    @field_validator("scenarios", "cells")
    @classmethod
    def _names(cls, found: dict[str, Any]) -> dict[str, Any]:
        for name in found:
            if name.endswith(AGAIN):
                raise ValueError(f"{name!r}: names that end in {AGAIN!r} are for the noise floor")
            if not re.match(NAME, name):
                raise ValueError(f"{name!r} is no name: letters, digits, blanks and ._=,()+- after a letter or digit")
        return found

    @model_validator(mode="after")
    def _parents_exist(self) -> Self:
        for name, cell in self.cells.items():
            if cell.parent is not None and cell.parent not in self.cells:
                raise ValueError(f"cells.{name}.parent: no cell is called {cell.parent!r}{did_you_mean(cell.parent, self.cells)}")
            if name in self._line(name):
                raise ValueError(f"cells.{name}.parent: {name!r} is its own ancestor; one cell must have no parent")
        for number, claim in enumerate(self.claims):
            for key, names in (("scenario", self.scenarios), ("cell", self.cells)):
                if getattr(claim, key) not in names:
                    raise ValueError(f"claims.{number}.{key}: there is none called {getattr(claim, key)!r}")
        return self

    def _line(self, name: str) -> list[str]:
        """Its ancestors, nearest first, up to the first that comes again."""
        line: list[str] = []
        parent = self.cells[name].parent
        while parent is not None and parent in self.cells and parent not in line:
            line.append(parent)
            parent = self.cells[parent].parent
        return line

    @property
    def baselines(self) -> list[str]:
        """Cells without a parent."""
        return [name for name, cell in self.cells.items() if cell.parent is None]

    def ordered(self) -> Iterator[tuple[str, CellSpec]]:
        """Cells, each after its parent, otherwise as written."""
        return iter(sorted(self.cells.items(), key=lambda pair: len(self._line(pair[0]))))


def load_spec(path: str | Path) -> AblationSpec:
    """Read a TOML file. Raises InvalidOptionsError that names file and key."""
    try:
        written = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidOptionsError(f"ablation file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidOptionsError(f"ablation file {path} is not valid TOML: {error}") from error
    return read_spec({"name": Path(path).stem, **written}, origin=str(path))


def read_spec(written: Mapping[str, Any], *, origin: str) -> AblationSpec:
    """Check a specification; `origin` names it in errors. Raises InvalidOptionsError with every problem and its key."""
    try:
        return AblationSpec.model_validate(written)
    except ValidationError as error:
        problems = [_problem(fault) for fault in error.errors()]
        raise InvalidOptionsError(f"ablation {origin}: {'; '.join(problems)}") from error


def _problem(fault: Any) -> str:
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "value_error":
        message = str(fault["ctx"]["error"])
        return message if not place or message.startswith(place) else f"{place}: {message}"
    if fault["type"] == "extra_forbidden":
        return f"{place}: {fault['msg']}{did_you_mean(str(fault['loc'][-1]), _known(fault['loc']))}"
    return f"{place}: {fault['msg']}" if fault["type"] == "missing" else f"{place}: {fault['msg']} (got {fault['input']!r:.60})"


def _known(place: tuple[Any, ...]) -> list[str]:
    """Keys that are allowed where this one stands."""
    table: type[BaseModel] = AblationSpec
    if len(place) > 2:
        table = CellSpec if place[0] == "cells" else LoadSpec if len(place) > 3 else ScenarioSpec
    return list(table.model_fields)
