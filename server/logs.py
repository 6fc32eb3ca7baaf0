"""The server's log: lines of text or JSON, to standard error or a file, which may be full.

Must not know: what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

from octavo.core.errors import ConfigError
from octavo.server.settings import ServerSettings


class DroppingHandler(logging.StreamHandler[TextIO]):
    """Writes lines; one that cannot be written (a full disk, a closed pipe) is dropped and counted, and nobody is held up."""

    num_dropped = 0

    def handleError(self, record: logging.LogRecord) -> None:
        """Count it."""
        type(self).num_dropped += 1


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what the record says of the request."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """A line for people: what the record says of the request comes behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without a traceback."""
        line, fields = super().formatMessage(record), getattr(record, "fields", None)
        if fields is None:  # our own words, which may take several lines
            return line
        return one_line(" ".join([line, *(f"{name}={value}" for name, value in fields.items())]))


def one_line(text: str) -> str:
    """What a terminal would obey and what would begin another line is written out: ids and paths are the callers' own words."""
    return text if text.isprintable() else "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def set_up(settings: ServerSettings) -> None:
    """Send the logs of Octavo and uvicorn where the settings say. Raises ConfigError if the file cannot be opened."""
    stream = _opened(settings.log_file) if settings.log_file else sys.stderr
    handler = DroppingHandler(stream)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else TextFormatter())
    for name in ("octavo", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _opened(path: str) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"server.log_file: {path!r} cannot be written: {error}") from error
