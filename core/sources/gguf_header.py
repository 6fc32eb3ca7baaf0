"""What a GGUF file says of itself beyond its tensors: the few facts that transformers' conversion leaves out.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
Must not know: torch, transformers, the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.core.errors import ModelSourceError

# Vocabularies whose words were learnt with each digit apart, then split as GPT-2 does (llama.cpp, src/llama-vocab.cpp).
DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
GPT2_SPLITS = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "roberta-bpe", "granite-docling"})
_END_KEYS = ("eos", "eot", "eom")  # end of text, of turn, of message: each ends an answer


@dataclass(frozen=True)
class GGUFHeader:
    """Facts of one GGUF file."""

    path: Path
    architecture: str
    figures: Mapping[str, Any]  # the metadata under the architecture's name, without it: "context_length" -> 8192
    rope_factors: Mapping[str, list[float]]  # tensors that are no weights: by what RoPE's frequencies are divided
    num_weights: int  # elements of all other tensors
    dtype: Literal["float32", "float16", "bfloat16"]  # of the weights once converted; quantised ones become bfloat16
    quantisation: str  # the commonest tensor type, as Q4_1
    end_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    unk_id: int | None
    tokenizer_kind: str | None  # "gpt2" for byte-level BPE, "llama" for SentencePiece
    pre_tokenizer: str | None

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """`end_ids` as configs have them."""
        return list(self.end_ids) if len(self.end_ids) > 1 else next(iter(self.end_ids), None)

    def refusal(self, reason: str) -> ModelSourceError:
        """The error that says why this file is not converted."""
        return ModelSourceError(f"{self.path} (GGUF, architecture {self.architecture!r}) cannot be converted: {reason}")


def read_header(path: Path) -> GGUFHeader:
    """Read a GGUF file's metadata and tensor table. Raises `ModelSourceError` for a cut, damaged or split file."""
    from gguf import GGUFReader

    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelSourceError(f"{path} is no GGUF file: it starts with {magic!r}. Fetch it again.")
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.tok")}
        matrices = [(tensor.tensor_type.name, int(tensor.n_bytes)) for tensor in reader.tensors if len(tensor.shape) > 1]
        factors = {tensor.name: tensor.data.tolist() for tensor in reader.tensors if tensor.name.startswith("rope_")}
        num_weights = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name not in factors)
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read: {error.strerror or error}") from error
    except ModelSourceError:
        raise
    except Exception as error:  # the reader has no error of its own: cut files end in ValueError, IndexError, UnicodeDecodeError
        raise ModelSourceError(f"{path} is cut short or damaged ({error}). Fetch it again.") from error
    if int(fields.get("split.count", 1)) > 1:
        raise ModelSourceError(
            f"{path} is one of {fields['split.count']} parts. Merge them first: llama-gguf-split --merge FIRST_PART OUTPUT.gguf"
        )
    if "general.architecture" not in fields or not matrices:
        raise ModelSourceError(f"{path} holds no language model: it names no architecture or has no weights.")

    def token(kind: str) -> int | None:
        value = fields.get(f"tokenizer.ggml.{kind}_token_id")
        return None if value is None else int(value)

    kinds = {name for name, _ in matrices}
    architecture = str(fields["general.architecture"])
    return GGUFHeader(
        path=path,
        architecture=architecture,
        figures={key.removeprefix(f"{architecture}."): value for key, value in fields.items() if key.startswith(f"{architecture}.")},
        rope_factors={name.removesuffix(".weight"): values for name, values in factors.items()},
        num_weights=num_weights,
        dtype="float32" if kinds == {"F32"} else "float16" if kinds == {"F16"} else "bfloat16",
        quantisation=_heaviest(matrices),
        end_ids=tuple(dict.fromkeys(i for i in map(token, _END_KEYS) if i is not None)),
        bos_id=token("bos"),
        pad_id=token("padding"),
        unk_id=token("unknown"),
        tokenizer_kind=_text(fields.get("tokenizer.ggml.model")),
        pre_tokenizer=_text(fields.get("tokenizer.ggml.pre")),
    )


def file_sha256(path: Path) -> str:
    """The file's SHA-256 in hex."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                digest.update(piece)
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _heaviest(matrices: list[tuple[str, int]]) -> str:
    weight: dict[str, int] = {}
    for name, num_bytes in matrices:
        weight[name] = weight.get(name, 0) + num_bytes
    return max(weight, key=lambda name: weight[name])


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
