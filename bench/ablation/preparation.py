"""Before anything is measured: every cell is built once, and what only shows then is checked.

Must not know: workloads, how cells are run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.bench.ablation.cells import Cell, check_one_change, make_cells, parts_of
from octavo.bench.ablation.engines import Engines
from octavo.bench.ablation.result import CellInfo
from octavo.bench.ablation.spec import AGAIN, AblationSpec
from octavo.core.assembly import BuiltEngine
from octavo.core.errors import IncompatibleStackError, InvalidOptionsError


def prepare(engines: Engines, spec: AblationSpec, scenario: str) -> tuple[list[Cell], list[CellInfo]]:
    """The cells that run, parents first and the first baseline again at the end; and what is known of all, those left out too.

    Raises ConfigError and its children where a cell cannot run and is not optional, where what `auto` chose differs in more than the
    named part, and where pools differ in bytes.
    """
    cells = make_cells(engines.registry, spec, scenario)
    cells.append(replace(cells[0], name=cells[0].name + AGAIN, parent=cells[0].name, change=""))
    built: dict[str, tuple[Cell, BuiltEngine]] = {}
    infos = []
    for cell in cells:
        problem = "" if cell.parent is None or cell.parent in built else f"its parent {cell.parent!r} is left out"
        try:
            if not problem:
                with engines.open(cell.config) as engine:
                    built[cell.name] = cell, engine
        except IncompatibleStackError as error:
            if not spec.cells[cell.name].optional:
                raise
            problem = str(error)
        infos.append(_info(cell, built[cell.name][1]) if not problem else _left_out(cell, problem))
    for cell, engine in built.values():
        if cell.parent is not None and not cell.name.endswith(AGAIN):
            above, above_engine = built[cell.parent]
            parts, before = parts_of(cell.config, engine.config.stack), parts_of(above.config, above_engine.config.stack)
            check_one_change(cell.name, above.name, parts, before)
    check_pools({name: engine for name, (_, engine) in built.items()})
    return [cell for cell, _ in built.values()], infos


def check_pools(built: dict[str, BuiltEngine]) -> None:
    """Pools must be equal in bytes, up to a part of a block. Raises InvalidOptionsError that names two that are not."""
    first, *others = built
    for name in others:
        mine, expected = built[name].pool, built[first].pool
        unit = max(pool.slot_bytes * max(pool.block_size, 1) for pool in (mine, expected))
        if abs(mine.num_bytes - expected.num_bytes) >= unit:
            raise InvalidOptionsError(
                f"cells.{name}: its KV pool has {mine.num_bytes} bytes, that of {first!r} {expected.num_bytes}: pools must be equal. Where "
                "slots differ in size (dtype, kv_dtype), set engine.kv_cache_memory instead of num_kv_slots"
            )


def _info(cell: Cell, built: BuiltEngine) -> CellInfo:
    stack = built.config.stack
    options: dict[str, Any] = {part.kind: {"plugin": part.name, **part.options.model_dump(mode="json")} for part in stack.parts}
    options["engine"] = built.config.engine.model_dump(mode="json") | {"max_model_len": built.config.max_model_len}
    return CellInfo(
        name=cell.name,
        parent=cell.parent,
        change=cell.change,
        stack=str(stack),
        pool_slots=built.pool.num_slots,
        pool_bytes=built.pool.num_bytes,
        options=options,
    )


def _left_out(cell: Cell, problem: str) -> CellInfo:
    return CellInfo(
        name=cell.name, parent=cell.parent, change=cell.change, stack="", pool_slots=0, pool_bytes=0, options={}, left_out=problem
    )
