"""Reads weights from the safetensors of a model folder: checked before anything is copied, converted on the way, never all held twice.

Files are mapped, and each is opened for one tensor at a time: what is resident beside the copies already made is one tensor.
Must not know: which tensors a model has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from octavo.core.errors import ModelSourceError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PLAIN = {"F64", "F32", "F16", "BF16"}


class Weights:
    """The tensors of one model folder, delivered as `dtype` on `device`."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Read the headers of the folder's files. Raises ModelSourceError: no safetensors, a shard is missing, a file is damaged."""
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file in _files(folder):
            try:
                with safe_open(file, framework="pt") as shard:
                    for name in shard.keys():  # noqa: SIM118 (not a dict)
                        self._note(name, file, shard.get_slice(name))
            except (SafetensorError, OSError) as error:
                raise ModelSourceError(f"cannot read weights from {file}: {error}. Fetch the file again.") from error

    def _note(self, name: str, file: Path, view: object) -> None:
        dtype, shape = view.get_dtype(), view.get_shape()  # type: ignore[attr-defined]
        if dtype not in _PLAIN:
            raise ModelSourceError(
                f"tensor {name} in {file} has dtype {dtype}; supported are {', '.join(sorted(_PLAIN))}: quantised weights are not"
            )
        self.shapes[name] = tuple(shape)
        self._files[name] = file

    def check(self, expected: Mapping[str, tuple[int, ...]], *, ignored: tuple[str, ...] = ()) -> None:
        """Raise a ModelSourceError that names every tensor that is missing, unexpected or of another shape than the config says.

        Names that end in one of `ignored` may be there.
        """
        wrong = [f"missing: {name} {list(expected[name])}" for name in expected if name not in self.shapes]
        wrong += [f"unexpected: {name}" for name in self.shapes if name not in expected and not name.endswith(ignored)]
        wrong += [
            f"shape of {name}: {list(self.shapes[name])}, config.json asks for {list(shape)}"
            for name, shape in expected.items()
            if self.shapes.get(name, shape) != shape
        ]
        if wrong:
            shown = "".join(f"\n  - {line}" for line in wrong[:20]) + (f"\n  - and {len(wrong) - 20} more" if len(wrong) > 20 else "")
            raise ModelSourceError(f"the weights in {self.folder} do not fit its config.json:{shown}")

    def load(self, *names: str) -> torch.Tensor:
        """The named tensors one below the other (joined along the first dimension) in one new tensor."""
        rows = sum(self.shapes[name][0] for name in names)
        out = torch.empty((rows, *self.shapes[names[0]][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name in names:
            stop = start + self.shapes[name][0]
            with safe_open(self._files[name], framework="pt") as shard:
                out[start:stop].copy_(shard.get_tensor(name))
            start = stop
        return out


def _files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index where there is one, else the usual single file, else all there are."""
    index = folder / _INDEX
    if not index.exists():
        found = [folder / _SINGLE] if (folder / _SINGLE).exists() else sorted(folder.glob("*.safetensors"))
        if not found:
            raise ModelSourceError(f"{folder} has no safetensors file: weights are read from no other format")
        return found
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelSourceError(f"{index} is not an index of safetensors files: {error!r}. Fetch the file again.") from error
    if missing := sorted(name for name in names if not (folder / name).exists()):
        raise ModelSourceError(f"{index} names files that are not there: {', '.join(missing)}. Fetch them again.")
    return [folder / name for name in sorted(names)]
