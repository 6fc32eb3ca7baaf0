"""Tiny models as folder and as GGUF file, an empty cache, and a stand-in for the hub on 127.0.0.1."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "5c0ffee5c0ffee5c0ffee5c0ffee5c0ffee5c0ff"[:40]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(autouse=True)
def octavo_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no other program's cache, and a hub that is off unless a test turns it on."""
    from huggingface_hub import constants

    home = tmp_path / "octavo-home"
    monkeypatch.setenv("OCTAVO_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-home" / "hub"))
    return home


def make_tokenizer() -> Any:
    """A byte-level BPE with SmolLM's specials, its digits apart, and the merges of a few words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
    )
    tokenizer.train_from_iterator(["the capital of the land", "a  b   c 12  34", "def f(x):\n    return x"] * 4, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in fp32, in two shards with an index. Read only: copy it before changing it."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            rope_theta=100000.0,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder, max_shard_size="150KB")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2]).save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


@pytest.fixture(scope="session")
def write_gguf(tiny_model: Path) -> Callable[..., Path]:
    """Write the tiny model as llama.cpp's converter would: `write(path, quantisation="F32", tied=False, **metadata)`."""
    import gguf
    import numpy as np
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    config = model.config
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{short}_proj": f"attn_{short}" for short in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
    }

    def rotate(weight: Any, heads: int) -> Any:  # llama.cpp pairs neighbouring dimensions in its rotary embedding
        rows, columns = weight.shape
        return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

    def write(path: Path, *, quantisation: str = "F32", tied: bool = False, pre: str = "smollm", eot: int | None = None) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_freq_base(100000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(config.vocab_size)
        spec = json.loads(make_tokenizer().to_str())["model"]
        tokens = sorted(spec["vocab"], key=spec["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in spec["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(2)
        writer.add_add_bos_token(False)
        if eot is not None:
            writer.add_eot_token_id(eot)
        writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}")

        def add(name: str, weight: Any) -> None:
            kind = gguf.GGMLQuantizationType[quantisation if weight.ndim > 1 else "F32"]
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)

        add("token_embd.weight", weights["model.embed_tokens.weight"])
        add("output_norm.weight", weights["model.norm.weight"])
        if not tied:
            add("output.weight", weights["lm_head.weight"])
        for layer in range(config.num_hidden_layers):
            for ours, theirs in names.items():
                weight = weights[f"model.layers.{layer}.{ours}.weight"]
                if theirs in ("attn_q", "attn_k"):
                    weight = rotate(weight, config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads)
                add(f"blk.{layer}.{theirs}.weight", weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@dataclass
class StandInHub:
    """What the stand-in serves and what it was asked. `faults` maps a part of a URL's path to (status, error code)."""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def serve(self, hub_id: str, folder: Path) -> None:
        self.repositories[hub_id] = {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub on 127.0.0.1 that speaks the part of the protocol which listing and downloading need."""
    state = StandInHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            return

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            state.requests.append(f"{self.command} {path}")
            status, headers, content = self.find(path)
            span = self.headers.get("Range")
            if span and status == 200:
                first, _, last = span.removeprefix("bytes=").partition("-")
                end = int(last) if last else len(content) - 1
                headers["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
                status, content = 206, content[int(first) : end + 1]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def find(self, path: str) -> tuple[int, dict[str, str], bytes]:
            for part, (status, code) in state.faults.items():
                if part in path:
                    return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"
            parts = path.strip("/").split("/")
            listing = parts[:2] == ["api", "models"]
            hub_id = "/".join(parts[2:4] if listing else parts[:2])
            files = state.repositories.get(hub_id)
            if files is None:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            revision = parts[5] if listing and len(parts) > 5 else parts[3] if len(parts) > 3 else "main"
            if revision not in ("main", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            if listing and "tree" in parts:
                tree = [{"type": "file", "path": name, "size": len(data), "oid": sha256(data).hexdigest()} for name, data in files.items()]
                return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
            if listing:
                siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                info = {"id": hub_id, "modelId": hub_id, "sha": COMMIT, "siblings": siblings}
                return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
            data = files.get("/".join(parts[4:]))
            if data is None:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            return 200, {"ETag": f'"{sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}, data

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", state.address)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_TOKEN", "")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join(5)
