"""Small tokenizers of the kinds that models have, trained in a blink: for tests, here and in plugins.

Their texts hold Latin, Hangul, Chinese and emoji, so that characters are split over tokens as in large ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 3 o'clock, isn't it?",
    "Hello world, hello there: a world of words!",
    "안녕하세요 세계, 반갑습니다",
    "你好世界，今天天气很好",
    "smile 😀 😃 family 👩‍👩‍👧 flag 🇰🇷",
    "def f(x):\n    return x ** 2\n",
] * 10


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: BPE over bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens(["<tool>", AddedToken("<｜extra｜>", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral: BPE over characters, unknown ones as byte-fallback tokens (here all but Latin ones)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator(TEXTS[:2], trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL_TOKENS, show_progress=False))
    description = json.loads(tokenizer.to_str())  # byte tokens are ordinary ones, which the trainer can't make
    vocabulary = description["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5 and XLM: a unigram model, spaces as "▁"."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """As BERT: continuations begin with "##"."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_suffix() -> Tokenizer:
    """As the first GPT: "</w>" ends a word and becomes a space, unless the text ends there."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL_TOKENS, end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "word_suffix": word_suffix,
}
