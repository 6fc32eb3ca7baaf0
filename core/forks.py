"""What happens among the sequences of one request: n samples part, a preempted family comes back.

The prompt runs once. From its one row of logits n tokens are sampled (or beams begin: `octavo.core.beam_search`), and the other
sequences fork from the first: they share its KV until they write.
"""

from __future__ import annotations

from octavo.core.kv import Allocator
from octavo.core.request import Request, Sequence, Status


def fork(kv: Allocator, parent: Sequence, child: Sequence, num_tokens: int) -> None:
    """Give `child` the first `num_tokens` computed positions of `parent`."""
    kv.fork(parent, child, num_tokens)
    child.status = Status.OPEN
    child.num_computed = child.num_scheduled = num_tokens


def unborn(request: Request) -> list[Sequence]:
    """The sequences that have not parted from a request's first one yet."""
    return [] if request.forked else [Sequence(f"{request.id}/{i}", request, i) for i in range(1, request.width)]


def split(kv: Allocator, lead: Sequence) -> list[Sequence]:
    """The prompt of a request with n > 1 is computed: its n sequences, the lead first, the others forked from it."""
    request = lead.request
    children = unborn(request)
    for child in children:
        fork(kv, lead, child, lead.num_computed)
        child.grammar = lead.grammar.copy() if lead.grammar is not None else None
    request.sequences += children
    request.forked = True
    return [lead, *children]


def common_prefix(sequences: list[Sequence]) -> int:
    """Positions that all these can share when computed again: their last tokens differ or are still to be run."""
    shortest = min(sequence.num_tokens for sequence in sequences) - 1
    rows = [sequence.tokens(0, shortest) for sequence in sequences]
    return next((i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1), shortest)


def rejoin(kv: Allocator, request: Request) -> None:
    """After a preemption the first sequence has computed the common prefix again: the others fork from it.

    Recomputed one by one they might not fit where they fitted shared. The lead itself may be further (a prefix cache hit).
    """
    lead, *others = request.sequences
    for sequence in others:
        fork(kv, lead, sequence, request.restore or 0)
    request.restore = None
