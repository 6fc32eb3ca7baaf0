"""Prompts that begin alike, more or less: shared prefixes, and retrieved documents in a new order each time.

Must not know: engines, arrivals.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from octavo.bench.drawing import Draw, WorkloadOptions
from octavo.bench.work import Item


class SharedPrefixOptions(WorkloadOptions):
    """How much is shared, by how many."""

    num_prefixes: int = Field(4, ge=1, description="different prefixes, drawn alike")
    prefix_len: int = Field(512, ge=1, description="tokens of a prefix")
    share: float = Field(1.0, ge=0, le=1, description="share of the requests that begin with one; others are as long, but their own")
    suffix_len: int = Field(32, ge=1, description="tokens after it, each request's own")
    output_len: int = Field(32, ge=1, description="output tokens")


def shared_prefix(draw: Draw, options: SharedPrefixOptions) -> list[Item]:
    """A few prefixes, each followed by something of one's own. All prompts are of one length, whatever is shared."""
    choices, tokens = draw.stream("choices"), draw.stream("tokens")
    prefixes = [draw.tokens(draw.stream(f"prefix {n}"), options.prefix_len) for n in range(options.num_prefixes)]
    sharing = round(options.share * draw.count)
    order = [True] * sharing + [False] * (draw.count - sharing)
    choices.shuffle(order)
    return [
        Item(
            prompt=(choices.choice(prefixes) if shares else draw.tokens(tokens, options.prefix_len))
            + draw.tokens(tokens, options.suffix_len),
            output_len=options.output_len,
            at=float(number),
        )
        for number, shares in enumerate(order)
    ]


class RagOptions(WorkloadOptions):
    """Of a question about retrieved documents."""

    documents: int = Field(20, ge=1, description="documents in the store")
    retrieved: int = Field(4, ge=1, description="documents before each question, in a random order")
    document_len: int = Field(192, ge=1, description="tokens of a document")
    system_len: int = Field(32, ge=0, description="tokens of instructions before them, the same for all")
    question_len: int = Field(24, ge=1, description="tokens of a question")
    output_len: int = Field(48, ge=1, description="output tokens")
    shuffled: bool = Field(True, description="the documents come in a random order; False: always in that of the store")

    @model_validator(mode="after")
    def _enough(self) -> RagOptions:
        if self.retrieved > self.documents:
            raise ValueError(f"{self.retrieved} documents cannot be retrieved from {self.documents}")
        return self


def rag(draw: Draw, options: RagOptions) -> list[Item]:
    """Instructions, retrieved documents, a question. A prefix is shared only as far as the documents come in the same order."""
    choices, tokens = draw.stream("choices"), draw.stream("tokens")
    system = draw.tokens(draw.stream("system"), options.system_len)
    store = [draw.tokens(draw.stream(f"document {n}"), options.document_len) for n in range(options.documents)]
    items = []
    for number in range(draw.count):
        found = choices.sample(range(options.documents), options.retrieved)
        if not options.shuffled:
            found.sort()
        context = tuple(token for document in found for token in store[document])
        prompt = system + context + draw.tokens(tokens, options.question_len)
        items.append(Item(prompt=prompt, output_len=options.output_len, at=float(number), class_name="rag"))
    return items
