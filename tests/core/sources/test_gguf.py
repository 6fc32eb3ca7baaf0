"""A GGUF file becomes a folder that plain transformers loads, with the weights, tokens and end ids of the original."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from octavo.core.errors import ModelSourceError
from octavo.core.sources import convert, resolve

TEXTS = ["the capital of the land", "안녕하세요, 세계", "🙂👩‍👩‍👧 ok", "def f(x):\n\treturn  x+1", "  1 23   456x", "a\u0301 ½ ²"]


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_fp32_gguf_gives_the_original_model_bit_for_bit(tiny_model: Path, write_gguf, tmp_path: Path, octavo_home: Path) -> None:
    """Every tensor equals the one the file was written from, and so do the architecture's numbers."""
    import torch

    file = write_gguf(tmp_path / "tiny.gguf")
    lines: list[str] = []
    found = resolve(file, report=lines.append)
    assert found.path.parent == octavo_home / "gguf"
    assert found.path.name.startswith(found.revision)
    assert found.origin == "GGUF file tiny.gguf (weights fp32)"
    assert any("converting tiny.gguf (llama, F32) to float32 safetensors, once" in line for line in lines)
    original, converted = load(tiny_model), load(found.path)
    ours = converted.state_dict()
    assert set(ours) == set(original.state_dict())
    for name, weight in original.state_dict().items():
        assert torch.equal(weight, ours[name]), name
    prompt = torch.tensor([[5, 77, 130, 9, 41]])
    assert torch.equal(original(prompt).logits, converted(prompt).logits)
    for key in ("rms_norm_eps", "num_key_value_heads", "vocab_size", "tie_word_embeddings", "max_position_embeddings", "architectures"):
        assert getattr(converted.config, key) == getattr(original.config, key), key
    assert converted.config.rope_parameters["rope_theta"] == 100000.0
    assert not [key for key in found.config if key == "quantization_config" or "name_or_path" in key]


def test_tokens_of_a_converted_tokenizer_are_those_of_the_original(tiny_model: Path, write_gguf, tmp_path: Path) -> None:
    """Digits stand alone as in training (GPT-2's split would join the space before one), and every text comes back."""
    from tokenizers import Tokenizer

    found = resolve(write_gguf(tmp_path / "tiny.gguf"))
    original = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    converted = Tokenizer.from_file(str(found.path / "tokenizer.json"))
    for text in TEXTS:
        assert converted.encode(text).ids == original.encode(text).ids, text
        assert converted.decode(converted.encode(text).ids) == text
    wrapped = converted.encode("<|im_start|>user<|im_end|>").ids
    assert (wrapped[0], wrapped[-1]) == (1, 2)


def test_chat_template_and_end_ids_survive(write_gguf, tmp_path: Path) -> None:
    """The template renders; each id that ends a turn is an end id, first the file's own."""
    from transformers import AutoTokenizer

    found = resolve(write_gguf(tmp_path / "tiny.gguf", eot=0))
    assert found.generation_config["eos_token_id"] == [2, 0]
    assert found.generation_config["bos_token_id"] == 1
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.model_max_length == 128
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_1"])
def test_quantised_weights_become_the_nearest_bf16(write_gguf, tmp_path: Path, quantisation: str) -> None:
    """Dequantised as the gguf package does, then rounded once; the head stays tied where the file has none."""
    import gguf
    import torch

    file = write_gguf(tmp_path / "tiny.gguf", quantisation=quantisation, tied=True)
    found = resolve(file)
    assert found.origin == f"GGUF file tiny.gguf (weights bf16, were quantised to {quantisation})"
    model = load(found.path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for theirs, ours in [("token_embd", "model.embed_tokens"), ("blk.1.ffn_up", "model.layers.1.mlp.up_proj")]:
        tensor = tensors[f"{theirs}.weight"]
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
        assert torch.equal(model.get_parameter(f"{ours}.weight"), expected)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_gguf_file_is_converted_once_wherever_it_lies(write_gguf, tmp_path: Path) -> None:
    """The checksum is the key: a copy inside a folder, or a second start, converts nothing."""
    first = resolve(write_gguf(tmp_path / "tiny.gguf"))
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "tiny.gguf", tmp_path / "folder" / "other.gguf")
    lines: list[str] = []
    second = resolve(str(tmp_path / "folder"), report=lines.append)
    assert second.path == first.path
    assert lines == [f"model {tmp_path / 'folder'}: cache, taken from {first.origin}"]


def test_an_unknown_text_split_is_said(write_gguf, tmp_path: Path) -> None:
    """Where the file names a way to split text that nobody here knows, the user hears of it."""
    lines: list[str] = []
    resolve(write_gguf(tmp_path / "tiny.gguf", pre="marsian"), report=lines.append)
    assert any("how this model splits text (marsian) is not known" in line for line in lines)


@pytest.mark.parametrize("keep", [3, 500, 20_000, -1])
def test_a_cut_gguf_file_is_named(write_gguf, tmp_path: Path, octavo_home: Path, keep: int) -> None:
    """Cut in magic, metadata or data: one error, nothing in the cache."""
    file = write_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelSourceError, match="Fetch it again") as caught:
        resolve(file)
    assert str(file) in str(caught.value)
    assert not list(octavo_home.glob("gguf/*/*"))


def test_an_architecture_that_transformers_does_not_know_leaves_nothing_behind(tmp_path: Path, octavo_home: Path) -> None:
    """The error names file and architecture."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "quartz")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((32, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelSourceError, match=r"odd\.gguf \(GGUF, architecture 'quartz'\) cannot be converted"):
        resolve(tmp_path / "odd.gguf")
    assert [path.name for path in octavo_home.glob("gguf/*") if not path.name.endswith(".lock")] == []


def test_several_gguf_files_in_a_folder_need_a_choice(write_gguf, tmp_path: Path) -> None:
    """The files are listed."""
    write_gguf(tmp_path / "a.gguf")
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ModelSourceError, match=r"holds 2 GGUF files. Give the path of one: a.gguf, b.gguf"):
        resolve(tmp_path)


def test_constants_get_their_short_decimals_back() -> None:
    """GGUF stores 32-bit floats; a double that is no 32-bit float is left alone."""
    assert convert._shortest(9.999999747378752e-06) == 1e-05
    assert convert._shortest(0.1) == 0.1
    assert convert._shortest(10000.0) == 10000.0


@pytest.fixture
def without_tokenizer_json(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with neither tokenizer.json nor a tokenizer's config."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    return folder


def test_vocab_and_merges_become_tokenizer_json_beside_links(tiny_model: Path, without_tokenizer_json: Path, octavo_home: Path) -> None:
    """The user's folder is left as it is; a cached one links to its files and adds tokenizer.json."""
    from tokenizers import Tokenizer

    folder = without_tokenizer_json
    spec = json.loads((tiny_model / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(spec["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in spec["merges"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    before = sorted(path.name for path in folder.iterdir())
    found = resolve(folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert found.path.parent == octavo_home / "tokenizers"
    assert (found.path / "config.json").is_symlink() and not (found.path / "tokenizer.json").is_symlink()
    ours = Tokenizer.from_file(str(found.path / "tokenizer.json"))
    theirs = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert ours.encode("the capital of the land").ids == theirs.encode("the capital of the land").ids
    load(found.path)


def test_a_sentencepiece_model_becomes_tokenizer_json(without_tokenizer_json: Path) -> None:
    """Its tokens are those of the sentencepiece library, for words, runs of spaces, and bytes."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    from tokenizers import Tokenizer

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the capital of the land", "hello world again", "안녕하세요 세계"] * 20),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (without_tokenizer_json / "tokenizer.model").write_bytes(model.getvalue())
    (without_tokenizer_json / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    ours = Tokenizer.from_file(str(resolve(without_tokenizer_json).path / "tokenizer.json"))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in ["the capital of the land", "hello   world", "안녕 세계", "🙂"]:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text), text


def test_what_a_sentencepiece_model_needs_is_named(without_tokenizer_json: Path, monkeypatch) -> None:
    """transformers would ask for another format's package."""
    (without_tokenizer_json / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setattr(convert, "_is_installed", lambda module: False)
    with pytest.raises(ModelSourceError, match=r"tokenizer\.model needs more to be converted: pip install sentencepiece protobuf"):
        resolve(without_tokenizer_json)
