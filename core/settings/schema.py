"""The JSON schema of a config file, for the plugins that are installed: for editors and for `octavo schema`.

Must not know: how a config is read.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from octavo.core.descriptors import KINDS
from octavo.core.options import PluginOptions
from octavo.core.registry import Registry
from octavo.core.settings.config import AUTO, AUTO_KINDS, DEFAULTS
from octavo.core.settings.engine import EngineSettings
from octavo.core.settings.presets import KEY as PRESET, PRESETS


def json_schema(registry: Registry) -> dict[str, Any]:
    """Sections as in a config file; the options of a section depend on its `plugin`."""
    sections: dict[str, Any] = {kind: (_section(registry, kind), {}) for kind in KINDS}
    summaries = "; ".join(f"{preset.name}: {preset.summary}" for preset in PRESETS.values())
    preset: Any = (Literal[tuple(PRESETS)], Field(None, description=f"a named config under the rest of this file. {summaries}"))
    fields = {PRESET: preset, **sections, "engine": (EngineSettings, {})}
    document = create_model("Octavo", __base__=PluginOptions, __doc__="An Octavo config file.", **fields)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document.model_json_schema()}


def _section(registry: Registry, kind: str) -> Any:
    """A plugin's name, or the union of all plugins' tables told apart by `plugin`."""
    variants = [_variant(kind, plugin.name, plugin.options, plugin.summary) for plugin in registry.descriptors(kind)]
    if kind in AUTO_KINDS:
        variants.append(_variant(kind, AUTO, PluginOptions, "The best built-in one that runs here."))
    if not variants:
        return str
    tables = reduce(operator.or_, variants)
    return str | (Annotated[tables, Field(discriminator="plugin")] if len(variants) > 1 else tables)


def _variant(kind: str, name: str, options: type[PluginOptions], summary: str) -> type[BaseModel]:
    """The options of one plugin as they stand in its table, with `plugin`, which only the default one may leave out."""
    default = DEFAULTS.settings[kind]
    fields: dict[str, Any] = {"plugin": (Literal[name], name if name == default["plugin"] else ...)}
    if "source" in default:
        fields |= {"source": (str, default["source"]), "revision": (str | None, None), "trust_remote_code": (bool, False)}
    return create_model(f"{kind}_{name}", __base__=options, __doc__=summary, **fields)
