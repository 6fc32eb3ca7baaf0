"""A work is made to fit a model's context, and what was cut is said.

Must not know: engines.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.bench.work import Item, Work


def clip(work: Work, max_model_len: int) -> tuple[Work, str]:
    """The work with no item longer than the context, and a sentence on what was changed, empty if nothing was.

    A prompt loses its last tokens, down to half of the context, then the output; of a conversation, the turns that do not fit are left out,
    and those after them.
    """
    kept: list[Item] = []
    place: dict[int, int] = {}
    before: dict[int, int] = {}  # tokens after which the next turn begins, by index in the old work
    cut = 0
    for index, item in enumerate(work.items):
        if item.after is not None:
            start = before.get(item.after)
            if start is None or start + len(item.prompt) + item.output_len > max_model_len:
                continue
            item = replace(item, after=place[item.after])
        else:
            start = 0
            if len(item.prompt) + item.output_len > max_model_len:
                cut += 1
                prompt = item.prompt[: max(1, max_model_len - item.output_len, max_model_len // 2)]
                item = replace(item, prompt=prompt, output_len=min(item.output_len, max_model_len - len(prompt)))
        place[index] = len(kept)
        before[index] = start + len(item.prompt) + item.output_len
        kept.append(item)
    dropped = len(work.items) - len(kept)
    changes = [f"{cut} of {len(work.items)} requests are cut to fit"] if cut else []
    changes += [f"{dropped} turns of conversations do not fit and are left out"] if dropped else []
    if not changes:
        return work, ""
    said = f"max_model_len is {max_model_len}: {', '.join(changes)}"
    return replace(work, items=kept, made_from=work.made_from | {"clipped": said}), said
