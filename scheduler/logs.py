"""Log lines of every process: one record, one line, on standard error.

Text for people, or one JSON object a line. Control characters in a message are escaped, so
nothing that a client sends can start a line of its own.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


class TextFormatter(logging.Formatter):
    """``[2026-01-31 12:00:00] message``; warnings and errors carry their level."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        origin = f" {self._process_name}" if self._process_name else ""
        line = f"[{stamp}{origin}] {level}{record.getMessage().translate(_ESCAPES)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """Keys: time (seconds since 1970), level, process, logger, message, traceback."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, str | float] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure_logging(level: str, log_format: str, process_name: str = "") -> None:
    """Sends every logger of this process to standard error. ``level`` is debug, info, warning
    or error; ``log_format`` is text or json. Replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(process_name))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
