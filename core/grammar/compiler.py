"""`GrammarCompiler`: what a structured output must follow becomes a `Grammar`, and each output's way through it a `Matcher`.

One compiler for an engine and its tokenizer. Compiled grammars are kept, the least recently used go first. Thread-safe: who does not want
to wait in the engine's thread compiles beforehand in another, and finds it here.
Must not know: requests, torch.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from octavo.core.errors import EngineError
from octavo.core.grammar.engine import fill, new_matcher, new_tokenizer, problem_of, shortened

if TYPE_CHECKING:
    from octavo.core.grammar.trial import Trial, Verdict
    from octavo.core.grammar.vocabulary import Vocabulary, Words
    from octavo.core.structured_outputs import StructuredOutputsParams
    from octavo.core.text.tokenizer import Tokenizer

MAX_GRAMMARS = 128
MAX_BYTES = 512 * 1024 * 1024  # of all kept grammars


class GrammarError(Exception):
    """A grammar cannot take the tokens that it was given; says why."""


class Grammar:
    """A compiled grammar. Immutable; threads may share it."""

    def __init__(self, vocabulary: Vocabulary, inner: Any, *, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._vocabulary = vocabulary
        self._inner = inner

    def matcher(self) -> Matcher:
        """At the start of an output."""
        return Matcher(self._vocabulary, self._inner.deep_copy())


class Matcher:
    """How far one output has come. Used by one thread at a time."""

    __slots__ = ("_begun", "_inner", "vocabulary")

    def __init__(self, vocabulary: Vocabulary, inner: Any, *, begun: bool = False) -> None:
        self.vocabulary = vocabulary
        self._inner = inner
        self._begun = begun

    def accept(self, token_ids: Seq[int]) -> bool:
        """Go on with these tokens; True where the output is complete and nothing may follow. Raises GrammarError."""
        ids = list(token_ids)
        if ids and not self._begun:
            ids[0] = int(self.vocabulary.first_ids[ids[0]])
            self._begun = True
        self._inner.consume_tokens(ids)
        if error := self.error:
            raise GrammarError(error)
        return bool(self._inner.is_stopped())

    @property
    def can_end(self) -> bool:
        """Whether the output is complete, though more may follow."""
        return bool(self._inner.is_accepting())

    @property
    def error(self) -> str:
        """Why it can go on no further, "" if it can, or is complete."""
        return shortened(problem_of(self._inner))

    def copy(self) -> Matcher:
        """For an output that begins with the same tokens."""
        return Matcher(self.vocabulary, self._inner.deep_copy(), begun=self._begun)


def next_tokens(matchers: Seq[Matcher]) -> Words:
    """[S, W] a bit for each token that goes on with the text; the end is none of them. The matchers are of one compiler."""
    import numpy as np

    vocabulary = matchers[0].vocabulary
    entries = np.zeros((len(matchers), -(-len(vocabulary.table) // 32)), dtype=np.int32)
    fill([matcher._inner for matcher in matchers], entries)
    allowed = vocabulary.allowed(entries)
    for row, matcher in enumerate(matchers):
        if not matcher._begun:
            allowed[row] = vocabulary.allowed_first(entries[row])
    return allowed


class GrammarCompiler:
    """Compiles for one tokenizer; loads llguidance when it is first asked."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, cpu_seconds: int | None = None) -> None:
        """`vocab_size` is the number of logits; `cpu_seconds`: after so many a grammar is refused."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = {} if cpu_seconds is None else {"cpu_seconds": cpu_seconds}
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._keeping, self._compiling = threading.Lock(), threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._llguidance: Any = None
        self._trial: Trial | None = None

    def compile(self, wanted: StructuredOutputsParams) -> Grammar:
        """Raises RequestError: it cannot be compiled, or in the time and memory that one request may have."""
        with self._keeping:
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
                return self._kept[wanted]
        with self._compiling:
            grammar = self._compile(wanted)
        with self._keeping:
            self._kept[wanted] = grammar
            while len(self._kept) > MAX_GRAMMARS or (len(self._kept) > 1 and sum(g.num_bytes for g in self._kept.values()) > MAX_BYTES):
                self._kept.popitem(last=False)
        return grammar

    def close(self) -> None:
        """End the helper process. Who compiles again starts another."""
        with self._compiling:
            self._stop_trial()

    def _compile(self, wanted: StructuredOutputsParams) -> Grammar:
        from octavo.core.grammar.notation import as_lark, explained, refused
        from octavo.core.grammar.vocabulary import Vocabulary

        if self._vocabulary is None:
            self._vocabulary = Vocabulary.of(self._tokenizer, size=self._vocab_size)
            self._llguidance = new_tokenizer(self._vocabulary.table, self._vocabulary.end)
        text = as_lark(wanted)
        verdict = self._judge(text, self._vocabulary)
        if verdict.error:
            raise refused(f"{wanted.kind} cannot be compiled: {explained(verdict.error, wanted.kind)}")
        inner = new_matcher(self._llguidance, text)
        grammar = Grammar(self._vocabulary, inner, num_bytes=verdict.num_bytes)
        start = grammar.matcher()
        if not next_tokens([start]).any():
            what = "only an empty output" if start.can_end else "nothing that this model's tokens could write"
            raise refused(f"{wanted.kind} allows {what}{': ' if start.error else ''}{start.error}")
        if error := problem_of(inner):
            raise refused(f"{wanted.kind} cannot be compiled: {error}")
        return grammar

    def _judge(self, text: str, vocabulary: Vocabulary) -> Verdict:
        from octavo.core.grammar.trial import Trial

        try:
            if self._trial is not None:
                try:
                    return self._trial.judge(text)
                except (OSError, EOFError):  # somebody ended the helper
                    self._stop_trial()
            self._trial = Trial(vocabulary.table, vocabulary.end, **self._limits)
            weakref.finalize(self, Trial.close, self._trial)
            return self._trial.judge(text)
        except (OSError, EOFError) as error:
            self._stop_trial()
            raise EngineError(f"the process that tries grammars out cannot be used: {error}") from error
        except BaseException:  # Ctrl-C, a signal handler's own: the verdict that still comes would be taken for the next grammar's
            self._stop_trial()
            raise

    def _stop_trial(self) -> None:
        if self._trial is not None:
            self._trial.close()
            self._trial = None
