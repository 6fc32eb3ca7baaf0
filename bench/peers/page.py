"""The page of a side-by-side run: the table with its targets, then what stands behind it.

Must not know: engines, processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from octavo.bench.intervals import Interval, ratio_interval
from octavo.bench.peers.claims import MEMORY, RATIOS, START, Limit, Ratio, judge, judge_limit
from octavo.bench.peers.outcome import Outcome

MB = 1e6
BUSY = 0.1  # of a core: from here on a run was disturbed, and says so
ALIKE, MANY = 0.5, 8
"""Of so many answers, fewer than this share begin with the same token: what was computed is another model, not rounded otherwise."""


def page(outcome: Outcome) -> str:
    """Markdown."""
    sections = (_head, _table, _absolute, _memory, _alike, _conditions)
    return "\n".join(line for section in sections for line in section(outcome)).rstrip() + "\n"


def _head(outcome: Outcome) -> Iterator[str]:
    known, settings = outcome.identity, outcome.settings
    yield "# Beside its peers on a CPU"
    yield ""
    if settings["scale"] != 1:
        yield f"> **Tried out at scale {settings['scale']:g}: work is smaller than its name says, and the figures mean nothing.**"
        yield ""
    if not outcome.finished:
        yield "> **Not finished**: the figures are of what was done."
        yield ""
    if most := _disturbed(outcome):
        yield f"> **The machine was busy with something else: up to {most:.2f} cores in a turn. Small differences mean nothing.**"
        yield ""
    for name, shares in _other_models(outcome).items():
        said = ", ".join(f"{share:.0%} in {timing}" for timing, share in shares.items())
        yield f"> **{name} answers differently: answers that begin with Octavo's token are {said}. It computes another model, it seems; "
        yield "> its figures are no comparison.**"
        yield ""
    yield (
        f"{known['cpu']}, {known['cores']} cores, {known['memory'] / 2**30:.0f} GiB, {settings['threads']} threads for each engine; "
        f"{known['date']}. Model: {known['model']}, in bf16 for all but llama.cpp, which has the GGUF file as it is. All are given the "
        f"same token ids at once, answer greedily and go on past EOS. The engines are loaded in processes of their own and take turns, in "
        f"another order each round, of which {settings['rounds']} count; whoever waits uses no CPU. Written by "
        f"`python -m octavo.bench.peers`; all times are in the JSON file beside this page."
    )
    yield ""


def _table(outcome: Outcome) -> Iterator[str]:
    yield "| work | Octavo | peer | times as fast, 95 % interval | par | aim | |"
    yield "|---|---|---|---|---|---|---|"
    rows = outcome.settings["rows"]
    for claim in RATIOS:
        if claim.row in rows:
            yield _cells(claim.title, *_ratio_cells(outcome, claim))
    for limit, figure in ((START, _start), (MEMORY, _beyond)):
        if limit.row in rows:
            yield _cells(limit.title, *_limit_cells(outcome, limit, figure))
    yield ""


def _ratio_cells(outcome: Outcome, claim: Ratio) -> tuple[str, ...]:
    targets = _target(claim.par, "x"), _target(claim.aim, "x")
    reasons = [outcome.problems[name] for name in (claim.ours, claim.peer) if name in outcome.problems]
    ours, theirs = _seconds(outcome, claim.timing, claim.ours), _seconds(outcome, claim.timing, claim.peer)
    shown = _middle(outcome, claim, claim.ours), f"{claim.peer} {_middle(outcome, claim, claim.peer)}"
    if reasons or not ours or len(ours) != len(theirs):
        return (*shown, "", *targets, f"not available: {'; '.join(reasons) or 'it was not run'}")
    ratio = ratio_interval(theirs, ours)
    differs = claim.peer in _other_models(outcome)
    return (*shown, _interval(ratio), *targets, "answers differ" if differs else judge(ratio, par=claim.par, aim=claim.aim))


def _interval(ratio: Interval) -> str:
    return str(ratio) if ratio.low > 0 else f"{ratio.ratio:.2f}x (one round)"


def _limit_cells(outcome: Outcome, claim: Limit, figure: Callable[[Outcome, str], tuple[float, str] | None]) -> tuple[str, ...]:
    targets = _target(claim.par, f" {claim.unit}"), _target(claim.aim, f" {claim.unit}")
    theirs = figure(outcome, claim.peer)
    peer = f"{claim.peer} {theirs[1] if theirs else '-'}"
    found = figure(outcome, claim.ours)
    if found is None:
        return "-", peer, "", *targets, f"not available: {outcome.problems.get(claim.ours, 'it was not run')}"
    ratio = f"{theirs[0] / found[0]:.1f}x less" if theirs and found[0] > 0 else ""
    return found[1], peer, ratio, *targets, judge_limit(found[0], claim)


def _start(outcome: Outcome, name: str) -> tuple[float, str] | None:
    seconds = outcome.starts.get(name)
    return (median(seconds), _spread(seconds, "s")) if seconds else None


def _beyond(outcome: Outcome, name: str) -> tuple[float, str] | None:
    """Most resident bytes during the work, less the weights and what the KV pool had of it, in MB. None where the pool is not known."""
    found = outcome.memory.get(name, {})
    kv = found.get("kv")
    if kv is None:
        return None
    mb = (found["peak"] - outcome.identity["weight_bytes"] - kv) / MB
    return mb, f"{mb:.0f} MB"


def _absolute(outcome: Outcome) -> Iterator[str]:
    """Medians of everybody, also of those that no row compares."""
    timings = {timing: found for timing, found in outcome.seconds.items() if any(found.values())}
    if not timings:
        return
    names = list(dict.fromkeys(name for found in timings.values() for name, seconds in found.items() if seconds))
    yield "## Seconds\n"
    yield "Median of the rounds, the least and the most. Output tokens over seconds are the tok/s above.\n"
    yield from _header("task", "output tokens", *names)
    for timing, found in timings.items():
        yield _cells(timing, str(outcome.tokens[timing]), *(_spread(found.get(name, []), "") or "" for name in names))
    yield ""
    if outcome.starts:
        said = "; ".join(f"{name} {_spread(seconds, 's')}" for name, seconds in outcome.starts.items())
        yield f"From the start of a process to its first token: {said}. It imports the engine, loads the model and asks for a token."
        if START.row in outcome.settings["rows"]:
            yield (
                "Of Octavo it is the command `octavo generate` with the same type, length, pool and threads, as often as there are rounds, "
                f"after a first time that does not count. {START.peer} is started twice, and the second time counts: the first reads files "
                "into the cache, and compiles."
            )
        yield ""


def _memory(outcome: Outcome) -> Iterator[str]:
    if not outcome.memory:
        return
    weights = outcome.identity["weight_bytes"]
    yield "## Memory\n"
    yield (
        "MB of resident memory: the most while the mixed task ran, of which weights (the size of the files) and those pages of the KV pool "
        "that were written to, and what is beyond; `-` where nobody knows where the pool lies. Beside it the most while it was loaded and "
        "warmed up.\n"
    )
    yield from _header("engine", "most", "weights", "KV pool", "beyond", "most when loading")
    for name, found in outcome.memory.items():
        kv = found["kv"]
        beyond = None if kv is None else found["peak"] - weights - kv
        numbers = found["peak"], weights, kv, beyond, found["start_peak"]
        yield _cells(name, *("-" if number is None else f"{number / MB:.0f}" for number in numbers))
    yield ""


def _alike(outcome: Outcome) -> Iterator[str]:
    found = {timing: by_engine for timing, by_engine in outcome.alike.items() if by_engine}
    if not found:
        return
    yield "## The same answers\n"
    yield (
        "Share of the answers that begin with the same token as Octavo's, and how much of an answer on average comes before the first "
        "difference. In bf16 engines round differently; after a near tie answers go apart, and random prompts have many.\n"
    )
    yield from _header("task", "engine", "first token", "before the first difference")
    for timing, by_engine in found.items():
        for name, (first, before) in by_engine.items():
            yield _cells(timing, name, f"{first:.0%}", f"{before:.0%}")
    yield ""


def _conditions(outcome: Outcome) -> Iterator[str]:
    yield "## Conditions\n"
    for name, facts in outcome.facts.items():
        said = [" ".join(pair) for pair in facts.get("versions", {}).items()]
        said += [f"{key} {_plain(value)}" for key, value in facts.items() if key != "versions"]
        yield f"- {name}: {', '.join(said)}"
    for name, problem in outcome.problems.items():
        yield f"- {problem if problem.startswith(name) else f'{name}: {problem}'}"
    if outcome.idle:
        idlest = ", ".join(f"{name} {share:.1%}" for name, share in outcome.idle.items())
        yield f"- Most of a core that an engine used while another one worked: {idlest}."
    if outcome.others:
        middle, most = median(outcome.others), max(outcome.others)
        yield f"- Cores used by anything but the engine at work: {middle:.2f} in the median turn, {most:.2f} at most."
    for task, digest in outcome.digests.items():
        yield f"- Work {task}: seed {outcome.settings['seed']}, sha256 {digest[:16]}."
    yield f"- It took {outcome.minutes:.0f} minutes."


def _plain(value: object) -> str:
    return "/".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def _disturbed(outcome: Outcome) -> float:
    """Cores at work elsewhere in the busiest turn, where that is worth a warning; else 0."""
    most = max(outcome.others, default=0.0)
    return most if most > BUSY else 0.0


def _other_models(outcome: Outcome) -> dict[str, dict[str, float]]:
    """Peers whose answers are none of the same model's: by timing, the share that begins alike. One answer alone has to be another."""
    found: dict[str, dict[str, float]] = {}
    peers = {claim.peer for claim in RATIOS}
    for timing, by_engine in outcome.alike.items():
        for name, (share, _) in by_engine.items():
            few = timing == "one" and share == 0
            if name in peers and (few or (outcome.answers.get(timing, 0) >= MANY and share < ALIKE)):
                found.setdefault(name, {})[timing] = share
    return found


def _seconds(outcome: Outcome, timing: str, name: str) -> list[float]:
    return outcome.seconds.get(timing, {}).get(name, [])


def _middle(outcome: Outcome, claim: Ratio, name: str) -> str:
    seconds = _seconds(outcome, claim.timing, name)
    if not seconds:
        return "-"
    return f"{median(seconds):.2f} s" if claim.unit == "s" else f"{outcome.tokens[claim.timing] / median(seconds):.0f} tok/s"


def _spread(values: Sequence[float], unit: str) -> str:
    if not values:
        return ""
    middle = f"{median(values):.2f}{f' {unit}' if unit else ''}"
    return f"{middle} ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else middle


def _target(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:g}{unit}"


def _header(*cells: str) -> Iterator[str]:
    yield _cells(*cells)
    yield f"|{'---|' * len(cells)}"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"
