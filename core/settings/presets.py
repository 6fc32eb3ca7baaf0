"""Named configs: what a preset sets lies over the defaults and under everything that a user writes.

Must not know: which plugins are installed, whether a setting is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.core.errors import InvalidOptionsError
from octavo.core.settings.layers import Layer, Table, merge, origin_of
from octavo.core.suggest import did_you_mean

KEY = "preset"  # at the top of a file, beside the sections

CHAT_BUDGET = 2048  # tokens a step: small, for a steady pace of those that decode (usual: 2048 to 4096)
OFFLINE_BUDGET = 16384  # large, for throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A stack with options. `settings` are sections as in a config file, each naming its plugin."""

    name: str
    summary: str
    settings: Mapping[str, Table]


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="fastertransformer",
            summary="static batches, the longest possible sequence reserved for each request: the oldest baseline",
            settings={"scheduler": {"plugin": "static"}, "allocator": {"plugin": "contiguous", "reservation": "max"}},
        ),
        Preset(
            name="orca",
            summary="continuous batching, the longest possible sequence reserved for each request: the vLLM paper's Orca (Max)",
            settings={"scheduler": {"plugin": "continuous"}, "allocator": {"plugin": "contiguous", "reservation": "max"}},
        ),
        Preset(
            name="vllm",
            summary="chunked prefill and prefix caching on paged KV",
            settings={"scheduler": {"plugin": "chunked"}, "allocator": {"plugin": "prefix"}},
        ),
        Preset(
            name="chat",
            summary="people wait for each token: small steps, so that a long prompt does not hold up those that read",
            settings={
                "scheduler": {"plugin": "chunked", "max_num_batched_tokens": CHAT_BUDGET},
                "allocator": {"plugin": "prefix"},
            },
        ),
        Preset(
            name="offline",
            summary="only the total time counts: large steps, prompts run whole",
            settings={
                "scheduler": {"plugin": "continuous", "max_num_batched_tokens": OFFLINE_BUDGET},
                "allocator": {"plugin": "prefix"},
            },
        ),
    )
}


def preset_layer(written: list[Layer]) -> Layer | None:
    """The preset that the topmost of these layers names, if one does.

    Where they name another plugin than the preset, its options for that section go with its plugin: one part of a preset can be
    changed and everything else kept. Raises InvalidOptionsError where no preset has that name.
    """
    asked: Table = {}
    for layer in written:
        asked = merge(asked, layer.settings)
    name = asked.get(KEY)
    if name is None:
        return None
    preset = PRESETS.get(name) if isinstance(name, str) else None
    if preset is None:
        raise InvalidOptionsError(
            f"no preset is called {name!r}{did_you_mean(str(name), PRESETS)}; presets are {', '.join(sorted(PRESETS))}"
            f"{origin_of([KEY], written)}"
        )
    kept = {section: table for section, table in preset.settings.items() if _plugin(asked.get(section)) in (None, table["plugin"])}
    return Layer(f"preset {name}", kept)


def _plugin(section: object) -> object:
    return section.get("plugin") if isinstance(section, Mapping) else None
