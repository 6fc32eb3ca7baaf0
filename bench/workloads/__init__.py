"""Workloads by name: `make_work` is the way from a name, sizes and a seed to a `Work`.

Must not know: engines, HTTP, how a work is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from octavo.bench.arrivals import Arrivals, spread
from octavo.bench.drawing import Draw, Encode, WorkloadOptions
from octavo.bench.work import Item, Work
from octavo.bench.workloads import conversations, lengths, mixtures, prefixes, recorded
from octavo.core.errors import RequestError
from octavo.core.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class Workload:
    """A named way to make items. `timed`: they come with times of their own."""

    name: str
    summary: str
    options: type[WorkloadOptions]
    make: Callable[[Draw, Any], list[Item]]
    timed: bool = False


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("random", "random tokens; lengths fixed, uniform or lognormal", lengths.RandomOptions, lengths.random_lengths),
        Workload(
            "sharegpt-like", "lognormal lengths with ShareGPT's means, 161 in and 338 out", lengths.LikeOptions, lengths.sharegpt_like
        ),
        Workload("alpaca-like", "lognormal lengths with Alpaca's means, 19 in and 58 out", lengths.LikeOptions, lengths.alpaca_like),
        Workload("near-limit", "prompts that leave just enough of the context", lengths.NearLimitOptions, lengths.near_limit),
        Workload("sharegpt", "first questions of ShareGPT's own JSON file", recorded.ShareGptOptions, recorded.sharegpt),
        Workload("trace", "lengths and times of a request log", recorded.TraceOptions, recorded.recorded_trace, timed=True),
        Workload("chat", "conversations of several turns, with pauses", conversations.ChatOptions, conversations.chats),
        Workload("agent", "an agent's conversation that grows with each tool call", conversations.AgentOptions, conversations.agent),
        Workload("shared-prefix", "a few prefixes that many requests share", prefixes.SharedPrefixOptions, prefixes.shared_prefix),
        Workload("rag", "questions after retrieved documents in a random order", prefixes.RagOptions, prefixes.rag),
        Workload("long-document", "long documents beside chats, by class", mixtures.LongDocumentOptions, mixtures.long_document),
        Workload("rerank-pointwise", "one short request for each document of a query", mixtures.RerankOptions, mixtures.rerank_pointwise),
        Workload("rerank-listwise", "one long request for all documents of a query", mixtures.RerankOptions, mixtures.rerank_listwise),
    )
}


def make_work(
    name: str,
    *,
    count: int,
    vocab_size: int,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    arrivals: Arrivals | None = None,
    encode: Encode | None = None,
) -> Work:
    """So many requests of a workload. Without `arrivals` they come at their own times where they have some, else all at once.

    `options` are the workload's own, `encode` makes tokens of text for those that read some. The same arguments give the same work.
    Raises RequestError.
    """
    workload = WORKLOADS.get(name)
    if workload is None:
        raise RequestError(
            f"there is no workload {name!r}{did_you_mean(name, WORKLOADS)}; there are: {', '.join(WORKLOADS)}", field="workload"
        )
    if count < 1:
        raise RequestError(f"a workload needs at least one request, not {count}", field="count")
    try:
        checked = workload.options(**(options or {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join((name, *map(str, first["loc"])))
        raise RequestError(f"{where}: {first['msg'].removeprefix('Value error, ')}", field=where) from None
    items = workload.make(Draw(count=count, seed=seed, vocab_size=vocab_size, encode=encode), checked)
    when = "at the times of the trace"
    if arrivals is not None or not workload.timed:
        items = spread(items, arrivals or Arrivals(), seed=seed)
        when = str(arrivals or Arrivals())
    made_from = {"workload": name, **checked.model_dump(), "count": count, "vocab_size": vocab_size, "arrivals": when}
    return Work(name=name, items=items, seed=seed, made_from=made_from)
