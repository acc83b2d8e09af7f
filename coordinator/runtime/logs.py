"""Log lines of a fleet's actors, as JSON or text. They never contain values of a state or credentials.

Only the fields of :data:`FIELDS` are taken from a record. The text of an error is logged if the error is this project's or the
operating system's. Of any other error only type and stack are logged, as its text may repeat the user's data.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from coordinator.model.errors import InvalidRequestError, StateStoreError, SumOverflowError
from coordinator.model.identities import DEFAULT_STORE, StateStoreId
from coordinator.model.names import PACKAGES, fleet_id_of

#: Fields of a line beside its message, if they are known, in this order. They come from ``extra=`` or from an error.
#: `partition` is the number in the paths of files: the shard's, as long as the state was not rescaled.
FIELDS = (
    "state", "query", "run", "shard", "partition", "store", "version", "epoch", "batch", "actor", "node", "error",
)  # fmt: skip
#: Environment of a node's Ray processes: ``json`` (the default) or ``text``.
_FORMAT = "STATEFLEET_LOG_FORMAT"
#: Errors about values of a caller, whose texts contain these values.
_OF_CALLERS = (InvalidRequestError, SumOverflowError)


def about(store_id: StateStoreId, **more: object) -> dict[str, object]:
    """Return the fields of a log line about a partition or one of its stores."""
    store = {} if store_id.store_name == DEFAULT_STORE else {"store": store_id.store_name}
    return {"state": store_id.state_name, "partition": store_id.partition_id, **store, **more}


def log_to_stderr(uri: str, process: str) -> None:
    """Log to this process's standard error, which Ray keeps with its logs; for actors."""
    line_format = os.environ.get(_FORMAT, "json")
    facts = {"fleet": fleet_id_of(uri), "process": process, "pid": os.getpid()}
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextLines() if line_format == "text" else JsonLines(facts))
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    if line_format not in ("json", "text"):
        logging.getLogger(__name__).warning("%s is `json` or `text`; this process logs JSON", _FORMAT)


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__()
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record; see :class:`logging.Formatter`."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            **self._facts,
            **_fields(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = _exception(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """Formats a record as text; a stack follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record; see :class:`logging.Formatter`."""
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {_message(record)}" + (fields and f" [{fields}]")
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + _exception(record.exc_info[1])
        return line


def _time(record: logging.LogRecord) -> str:
    return dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    args = record.args
    if not isinstance(args, tuple) or not args:
        return record.getMessage()
    return str(record.msg) % tuple(_safe_text(arg) if isinstance(arg, BaseException) else arg for arg in args)


def _safe_text(error: BaseException) -> str:
    """Return the type of an error, and its text if that contains no data of users."""
    is_known = isinstance(error, StateStoreError | OSError) and not isinstance(error, _OF_CALLERS)
    return f"{type(error).__name__}: {error}" if is_known else type(error).__name__


def _errors(record: logging.LogRecord) -> Iterator[BaseException]:
    if record.exc_info and record.exc_info[1] is not None:
        yield record.exc_info[1]
    if isinstance(record.args, tuple):
        yield from (arg for arg in record.args if isinstance(arg, BaseException))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for error in _errors(record):
        context = error.context if isinstance(error, StateStoreError) else {}
        fields |= {"error": type(error).__name__} | {name: context[name] for name in FIELDS if name in context}
    extras = {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
    fields |= extras
    return {name: fields[name] for name in FIELDS if name in fields}


def _exception(error: BaseException) -> str:
    """Return stack, type and text of an error and of its causes; the first cause comes first."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    stack = "".join(traceback.format_tb(error.__traceback__))
    return (f"{_exception(cause)}\n" if cause is not None else "") + f"{stack}{_safe_text(error)}"
