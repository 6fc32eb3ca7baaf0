"""A model that is already on this machine: a Hugging Face folder, or a GGUF file, also inside a folder.

Must not know: the network, the catalogue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from octavo.core.errors import ModelSourceError
from octavo.core.sources.cache import Report, fresh, home, obtain, read_provenance, write_provenance
from octavo.core.sources.convert import CONVERSION, convert_gguf, make_tokenizer
from octavo.core.sources.gguf_header import file_sha256, read_header
from octavo.core.sources.model_source import ModelSource, read_folder

_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model")


def looks_like_model(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a folder that holds one or a config.json."""
    return path.is_file() or (path / "config.json").is_file() or any(path.glob("*.gguf"))


def from_path(path: Path, *, name: str, trust_remote_code: bool, report: Report) -> ModelSource:
    """The model at an existing file or folder."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelSourceError(f"{path} is a file but no .gguf file. Give the model's folder, or a GGUF file.")
        return from_gguf(path, name=name, report=report)
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and not any(path.glob("*.safetensors")):
        if len(ggufs) > 1:
            raise ModelSourceError(f"{path} holds {len(ggufs)} GGUF files. Give the path of one: {', '.join(file.name for file in ggufs)}")
        return from_gguf(ggufs[0], name=name, report=report)
    return _from_folder(path, name=name, trust_remote_code=trust_remote_code, report=report)


def from_gguf(path: Path, *, name: str, report: Report) -> ModelSource:
    """A GGUF file, converted on first use; the cache knows it by its checksum, wherever the file lies."""
    quantisation = read_header(path).quantisation
    kept = quantisation in {"F32", "F16", "BF16"}
    origin = f"GGUF file {path.name} (weights {{dtype}}{'' if kept else f', were quantised to {quantisation}'})"

    def convert(staging: Path) -> None:
        convert_gguf(path, staging, report=report)

    return from_conversion(file_sha256(path), name=name, origin=origin, convert=convert, report=report)


def from_conversion(sha256: str, *, name: str, origin: str, convert: Callable[[Path], None], report: Report) -> ModelSource:
    """The cached conversion of the GGUF file with this checksum; `convert(staging)` makes it where it is not there."""
    folder = converted_folder(sha256)
    made: list[Path] = []

    def build(staging: Path) -> None:
        with fresh(staging):
            convert(staging)
            source = read_folder(staging, name=name, origin=origin, revision=sha256)
            write_provenance(staging, origin=source.origin, revision=sha256)
            made.append(staging)

    obtain(folder, build, check=lambda path: read_cached(path, name=name), report=report)
    return read_folder(folder, name=name, origin=origin, revision=sha256) if made else read_cached(folder, name=name)


def converted_folder(sha256: str) -> Path:
    """Where the conversion of a GGUF file lies in the cache."""
    return home() / "gguf" / f"{sha256}-v{CONVERSION}"


def read_cached(folder: Path, *, name: str) -> ModelSource:
    """A folder of the cache. Raises `ModelSourceError` where it is not whole."""
    origin, revision = read_provenance(folder)
    return read_folder(folder, name=name, origin=f"cache, taken from {origin}", revision=revision)


def _from_folder(path: Path, *, name: str, trust_remote_code: bool, report: Report) -> ModelSource:
    origin = f"local folder {path} (weights {{dtype}})"
    others = [path / file for file in _TOKENIZER_FILES if (path / file).is_file()]
    if (path / "tokenizer.json").is_file() or not others or not (path / "config.json").is_file():
        return read_folder(path, name=name, origin=origin, revision="local", trust_remote_code=trust_remote_code)
    # The user's folder stays as it is: a cached one links to its files and adds tokenizer.json.
    key = hashlib.sha256("\n".join([str(path.resolve()), *(file_sha256(file) for file in others)]).encode()).hexdigest()

    def check(folder: Path) -> ModelSource:
        return read_folder(folder, name=name, origin=origin, revision="local", trust_remote_code=trust_remote_code)

    def build(staging: Path) -> None:
        with fresh(staging):
            for file in path.iterdir():
                if file.is_file():
                    (staging / file.name).symlink_to(file.resolve())
            make_tokenizer(path, staging, trust_remote_code=trust_remote_code, report=report)

    folder = home() / "tokenizers" / key
    obtain(folder, build, check=check, report=report)
    return check(folder)
