"""Octavo: an LLM inference engine made of plugins.

    from octavo import LLM, SamplingParams

    with LLM(model="smollm2-135m") as llm:
        print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

Names are imported when they are first used, so that `import octavo` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo._version import __version__ as __version__

if TYPE_CHECKING:
    from octavo.core.beam_search_params import BeamSearchParams as BeamSearchParams
    from octavo.core.errors import OctavoError as OctavoError
    from octavo.core.outputs import CompletionOutput as CompletionOutput, RequestOutput as RequestOutput, StepReport as StepReport
    from octavo.core.sampling_params import SamplingParams as SamplingParams
    from octavo.core.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from octavo.llm import LLM as LLM

_HOME = {
    "LLM": "octavo.llm",
    "SamplingParams": "octavo.core.sampling_params",
    "BeamSearchParams": "octavo.core.beam_search_params",
    "StructuredOutputsParams": "octavo.core.structured_outputs",
    "RequestOutput": "octavo.core.outputs",
    "CompletionOutput": "octavo.core.outputs",
    "StepReport": "octavo.core.outputs",
    "OctavoError": "octavo.core.errors",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "OctavoError",
    "RequestOutput",
    "SamplingParams",
    "StepReport",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
