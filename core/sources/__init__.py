"""Where a model comes from: a folder, the hub, a GGUF file or the catalogue. All end as one folder of one shape.

Must not know: engines, plugins, tensors on a device. Imports torch and transformers only to convert.
"""

from __future__ import annotations

from octavo.core.sources.catalogue import CATALOGUE, DEFAULT_MODEL, CatalogueEntry
from octavo.core.sources.model_source import ModelSource
from octavo.core.sources.resolve import resolve

__all__ = ["CATALOGUE", "DEFAULT_MODEL", "CatalogueEntry", "ModelSource", "resolve"]
