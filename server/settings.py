"""Settings of the server itself; the engine's are in the config (`octavo.core.settings`).

Must not know: FastAPI, engines.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from octavo.core.options import PluginOptions

Seconds = Annotated[float, Field(gt=0)]


def _one_or_more(value: Any) -> Any:
    """Files and the environment write lists; one alone needs no brackets."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_one_or_more, json_schema_input_type=str | list[str])]


class ServerSettings(PluginOptions):
    """The `[server]` table of a config file, and the flags of `octavo serve`."""

    host: str = Field("127.0.0.1", description="address to listen at; 0.0.0.0: all")
    port: int = Field(8000, ge=0, le=65535, description="port to listen at; 0: any free one")
    api_key: Strings = Field((), description="keys that callers must bring as bearer tokens; none: everybody may call")
    classes_by_key: dict[str, str] = Field({}, description="the class of requests by the caller's API key; others are of class default")
    served_model_name: Strings = Field((), description="names that requests may use for the model; none: the model's own")
    timeout_s: Seconds | None = Field(None, description="most seconds of a request that asks for no timeout of its own")
    max_timeout_s: Seconds | None = Field(None, description="most seconds that a request may ask for")
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds that running requests get to finish after SIGTERM")
    step_timeout_s: Seconds | None = Field(120.0, description="a step that takes longer ends the process; None: never")
    client_timeout_s: Seconds | None = Field(
        60.0, description="a client that takes longer to send its request, or to read on in its answer, is hung up on; None: never"
    )
    max_body_bytes: int = Field(32 * 2**20, ge=1024, description="largest body of a request")
    on_death: Literal["exit", "stay"] = Field("exit", description="what the process does when the engine cannot go on")
    metrics_prefix: Literal["octavo", "vllm"] = Field("octavo", description="what the names of metrics begin with")
    log_format: Literal["text", "json"] = Field("text", description="form of the log's lines")
    log_file: str | None = Field(None, description="where the log goes; None: standard error. A full disk drops lines, and counts them")
    flight_steps: int = Field(256, ge=1, le=100_000, description="steps that /debug/flight shows, and that are kept for after a failure")
    flight_dir: str | None = Field(None, description="where these are written when a step fails or hangs; None: in short to the log alone")
    log_prompts: bool = Field(False, description="write prompts into the log")

    @model_validator(mode="after")
    def _keys(self) -> Self:
        if any(not key or key != key.strip() for key in self.api_key):
            raise ValueError("api_key holds a key that is empty, or has spaces around it: nobody, or everybody, could bring it")
        unknown = sorted(set(self.classes_by_key) - set(self.api_key)) if self.api_key else sorted(self.classes_by_key)
        if unknown:
            raise ValueError(f"classes_by_key names {len(unknown)} key(s) that api_key does not hold")
        return self
