"""Structured logs: one JSON object a line on standard error, or plain lines for a person at a terminal."""

import json
import logging
import sys
from datetime import UTC, datetime
from enum import Enum, StrEnum
from typing import Any

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LogLevel(StrEnum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @classmethod
    def _missing_(cls, value: object) -> "LogLevel | None":
        """A level in capitals, as Python's own names of them are."""
        return next((level for level in cls if level.value == str(value).lower()), None)


class LogFormat(Enum):
    """How a log line looks."""

    JSON = "json"
    TEXT = "text"


class JsonFormatter(logging.Formatter):
    """Writes time, level, logger, message and whatever `extra` brought."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        body: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        body |= extra_of(record)
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)


class TextFormatter(logging.Formatter):
    """Writes the message and its extras as `key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback of an exception below it."""
        extras = "".join(f" {key}={value}" for key, value in extra_of(record).items())
        line = f"{record.levelname.lower():7} {record.name}: {record.getMessage()}{extras}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def extra_of(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller of the logger passed as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


def configure_logging(level: LogLevel, log_format: LogFormat) -> None:
    """Sends every log of the process to standard error, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
