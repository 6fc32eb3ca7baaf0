"""Kinds of requests that disturb each other, told apart by their class: long documents beside chats, reranking beside chats.

Must not know: engines, arrivals.
"""

from __future__ import annotations

from pydantic import Field

from octavo.bench.drawing import Draw, WorkloadOptions, lognormal
from octavo.bench.work import Item


class LongDocumentOptions(WorkloadOptions):
    """Of the documents and of the chats."""

    every: int = Field(10, ge=2, description="one request in so many brings a document")
    document_len: int = Field(1536, ge=1, description="tokens of a document")
    document_output_len: int = Field(64, ge=1, description="output tokens about it")
    chat_input_len: int = Field(40, ge=1, description="mean tokens of a chat's prompt (lognormal)")
    chat_output_len: int = Field(64, ge=1, description="mean tokens of a chat's answer (lognormal)")
    chat_cv: float = Field(0.7, ge=0, description="coefficient of variation of both")


def long_document(draw: Draw, options: LongDocumentOptions) -> list[Item]:
    """Chats (class `chat`), and now and then a long document (class `document`), in the middle of each group of so many."""
    lengths, tokens = draw.stream("lengths"), draw.stream("tokens")
    items = []
    for number in range(draw.count):
        if number % options.every == options.every // 2:
            size, output, name = options.document_len, options.document_output_len, "document"
        else:
            size = lognormal(lengths, options.chat_input_len, options.chat_cv)
            output, name = lognormal(lengths, options.chat_output_len, options.chat_cv), "chat"
        items.append(Item(prompt=draw.tokens(tokens, size), output_len=output, at=float(number), class_name=name))
    return items


class RerankOptions(WorkloadOptions):
    """Of a query over many documents."""

    documents: int = Field(100, ge=1, description="documents that a query ranks")
    query_len: int = Field(24, ge=1, description="tokens of a query, with the instructions before it")
    document_len: int = Field(32, ge=1, description="tokens of a document")
    output_len: int = Field(2, ge=1, description="output tokens: a score, or of a list, tokens for each document")
    bystanders: int = Field(0, ge=0, description="chats that arrive after each query, one after the other")
    chat_input_len: int = Field(40, ge=1, description="tokens of such a chat's prompt")
    chat_output_len: int = Field(32, ge=1, description="tokens of its answer")


def rerank_pointwise(draw: Draw, options: RerankOptions) -> list[Item]:
    """Each query is as many short requests as it has documents, which arrive together; all begin with the query."""
    return _rerank(draw, options, pointwise=options.documents)


def rerank_listwise(draw: Draw, options: RerankOptions) -> list[Item]:
    """Each query is one long request with all documents in it."""
    return _rerank(draw, options, pointwise=0)


def _rerank(draw: Draw, options: RerankOptions, *, pointwise: int) -> list[Item]:
    tokens, others = draw.stream("tokens"), draw.stream("bystanders")
    items: list[Item] = []
    arrival = 0
    while len(items) < draw.count:
        query = draw.tokens(tokens, options.query_len)
        documents = [draw.tokens(tokens, options.document_len) for _ in range(options.documents)]
        prompts = [query + document for document in documents] if pointwise else [query + sum(documents, ())]
        output = options.output_len if pointwise else options.output_len * options.documents
        items += [Item(prompt=prompt, output_len=output, at=float(arrival), class_name="rerank") for prompt in prompts]
        for number in range(options.bystanders):
            prompt = draw.tokens(others, options.chat_input_len)
            items.append(Item(prompt=prompt, output_len=options.chat_output_len, at=float(arrival + 1 + number), class_name="chat"))
        arrival += 1 + options.bystanders
    return items[: draw.count]
