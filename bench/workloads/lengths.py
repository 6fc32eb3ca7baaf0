"""Independent requests of random tokens, whose lengths are fixed, uniform, lognormal, or like those of a known data set.

Must not know: engines, arrivals.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from octavo.bench.drawing import Draw, WorkloadOptions, lognormal, uniform
from octavo.bench.work import Item


class RandomOptions(WorkloadOptions):
    """Lengths in tokens."""

    input_len: int = Field(1024, ge=1, description="mean prompt tokens, the common prefix apart")
    output_len: int = Field(128, ge=1, description="mean output tokens")
    range_ratio: float = Field(0.0, ge=0, lt=1, description="lengths are uniform between 1 - ratio and 1 + ratio times these")
    input_cv: float = Field(0.0, ge=0, description="prompts are lognormal with this coefficient of variation, instead of uniform")
    output_cv: float = Field(0.0, ge=0, description="outputs are lognormal with this coefficient of variation, instead of uniform")
    prefix_len: int = Field(0, ge=0, description="tokens before each prompt that all have in common")

    @model_validator(mode="after")
    def _one_distribution(self) -> RandomOptions:
        if self.range_ratio and (self.input_cv or self.output_cv):
            raise ValueError("range_ratio makes lengths uniform, input_cv and output_cv lognormal: give one or the other")
        return self


def random_lengths(draw: Draw, options: RandomOptions) -> list[Item]:
    """Random tokens after a common prefix."""
    lengths, tokens = draw.stream("lengths"), draw.stream("tokens")
    prefix = draw.tokens(draw.stream("prefix"), options.prefix_len)
    items = []
    for number in range(draw.count):
        if options.input_cv or options.output_cv:
            size, output = (
                lognormal(lengths, mean, cv)
                for mean, cv in ((options.input_len, options.input_cv), (options.output_len, options.output_cv))
            )
        else:
            size, output = (uniform(lengths, length, options.range_ratio) for length in (options.input_len, options.output_len))
        items.append(Item(prompt=prefix + draw.tokens(tokens, size), output_len=output, at=float(number)))
    return items


class LikeOptions(WorkloadOptions):
    """How much lengths vary, as standard deviation over mean."""

    input_cv: float = Field(1.0, ge=0, description="coefficient of variation of prompt lengths (not in the paper: an assumption)")
    output_cv: float = Field(0.87, ge=0, description="coefficient of variation of output lengths")


def sharegpt_like(draw: Draw, options: LikeOptions) -> list[Item]:
    """Lognormal lengths with the means that the PagedAttention paper gives for ShareGPT: 161 in, 338 out."""
    return _like(draw, options, 161, 338)


def alpaca_like(draw: Draw, options: LikeOptions) -> list[Item]:
    """Lognormal lengths with the means that the PagedAttention paper gives for Alpaca: 19 in, 58 out."""
    return _like(draw, options, 19, 58)


def _like(draw: Draw, options: LikeOptions, inputs: int, outputs: int) -> list[Item]:
    return random_lengths(
        draw, RandomOptions(input_len=inputs, output_len=outputs, input_cv=options.input_cv or 1e-9, output_cv=options.output_cv or 1e-9)
    )


class NearLimitOptions(WorkloadOptions):
    """How near."""

    context: int = Field(2048, ge=2, description="the context limit: prompt and output together come close to it")
    output_len: int = Field(16, ge=1, description="output tokens")
    slack: int = Field(32, ge=0, description="each is at most so many tokens shorter than the limit")

    @model_validator(mode="after")
    def _fits(self) -> NearLimitOptions:
        if self.context <= self.output_len + self.slack:
            raise ValueError(f"a context of {self.context} has no room for {self.output_len} output tokens and a slack of {self.slack}")
        return self


def near_limit(draw: Draw, options: NearLimitOptions) -> list[Item]:
    """Prompts that leave just enough of the context for their output."""
    lengths, tokens = draw.stream("lengths"), draw.stream("tokens")
    longest = options.context - options.output_len
    return [
        Item(
            prompt=draw.tokens(tokens, longest - lengths.randint(0, options.slack)),
            output_len=options.output_len,
            at=float(number),
            class_name="long",
        )
        for number in range(draw.count)
    ]
