"""In which order prompts that are all known are best sent: those that begin alike together, long ones first.

Together, since a pool that cannot keep all prefixes finds one again only while it is still there. Long first, since what runs at the end
runs with few others. Must not know: requests, engines.
"""

from __future__ import annotations

from collections.abc import Sequence


def sending_order(prompts: Sequence[Sequence[int]], *, block_size: int) -> list[int]:
    """The indices of `prompts` (token ids), reordered. With `block_size` 0, where nothing can be shared, by length alone.

    Prompts are paths through a tree of full blocks, which is walked depth first, at each fork into the branch with the longest prompt.
    """
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, block) -> node; the root is 0
    longest = [0]  # by node: the length of the longest prompt through it
    paths: list[list[int]] = []
    for ids in prompts:
        path, node = [], 0
        for stop in range(block_size, len(ids) + 1, block_size) if block_size else ():
            node = nodes.setdefault((node, tuple(ids[stop - block_size : stop])), len(longest))
            if node == len(longest):
                longest.append(0)
            longest[node] = max(longest[node], len(ids))
            path.append(node)
        paths.append(path)
    # A prompt that ends at a fork is shorter than all that go on: 1 sorts it behind them.
    return sorted(range(len(prompts)), key=lambda i: [*((-longest[node], node) for node in paths[i]), (1, -len(prompts[i]))])
