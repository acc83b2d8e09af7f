"""Logs of actors: a line for each event, with fields of a fixed set, and no user data."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from coordinator.model.errors import CorruptStateError, InvalidRequestError
from coordinator.model.identities import StateStoreId
from coordinator.model.names import PACKAGES
from coordinator.runtime import logs
from coordinator.runtime.logs import JsonLines, TextLines, about, log_to_stderr

CANARY = "canary-4711"


def line(message: str, *args: object, error: BaseException | None = None, **extra: Any) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    logger = logging.getLogger("coordinator.test")
    return logger.makeRecord(logger.name, logging.WARNING, "file", 1, message, args, info, extra=extra)


def formatted(record: logging.LogRecord) -> dict[str, Any]:
    text = JsonLines({"fleet": "f", "process": "coordinator", "pid": 7}).format(record)
    assert "\n" not in text
    fields: dict[str, Any] = json.loads(text)
    return fields


def raised(error: BaseException) -> BaseException:
    """Return an error with a stack trace."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_line_has_its_fields_and_no_others() -> None:
    context = about(StateStoreId("file:///f/clicks", 0, 3, "right"), version=0, epoch=5, run=None)
    fields = formatted(line("shard %d", 3, **context, key=CANARY, row={"user": CANARY}))
    assert fields.pop("time").endswith("Z")
    assert fields == {
        "level": "WARNING", "logger": "coordinator.test", "message": "shard 3", "fleet": "f", "process": "coordinator", "pid": 7,
        "state": "clicks", "partition": 3, "store": "right", "version": 0, "epoch": 5,
    }  # fmt: skip


def test_text_lines_have_the_same_fields() -> None:
    text = TextLines().format(line("shard %d", 3, state="clicks", version=4))
    assert text.endswith(" WARNING coordinator.test: shard 3 [state=clicks version=4]")


def test_an_error_of_statefleet_adds_its_context_to_the_line() -> None:
    error = raised(CorruptStateError("a file is damaged", file="clicks/0/3/4.delta", state="clicks", version=4))
    fields = formatted(line("falling back: %s", error, error=error, epoch=9))
    assert fields["message"] == f"falling back: CorruptStateError: {error}"
    assert (fields["state"], fields["version"], fields["epoch"], fields["error"]) == (
        "clicks",
        4,
        9,
        "CorruptStateError",
    )
    assert "in raised" in fields["exception"]
    assert fields["exception"].endswith(str(error))


def unforeseen() -> BaseException:
    """Return an error whose text repeats a value, and whose cause's text does too."""
    with pytest.raises(pa.ArrowInvalid, match=CANARY) as cause:
        pa.array([CANARY]).cast(pa.int64())
    with pytest.raises(ValueError, match=CANARY) as caught:
        raise ValueError(f"no number: {CANARY}") from cause.value
    return caught.value


@pytest.mark.parametrize(
    "error",
    [unforeseen(), raised(InvalidRequestError("this is no user", value=CANARY))],
    ids=lambda error: str(type(error)),
)
@pytest.mark.parametrize("formatter", [JsonLines({}), TextLines()])
def test_no_error_text_that_may_repeat_values_is_logged(error: BaseException, formatter: logging.Formatter) -> None:
    text = formatter.format(line("it failed: %s", error, error=error))
    assert CANARY not in text
    assert type(error).__name__ in text
    if error.__cause__ is not None:
        assert "ArrowInvalid" in text
        assert "in unforeseen" in text


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restore the loggers of the packages after the test."""
    kept = [(logger, logger.handlers, logger.propagate, logger.level) for logger in map(logging.getLogger, PACKAGES)]
    yield
    for logger, handlers, propagate, level in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("loggers")
@pytest.mark.parametrize("log_format", [None, "json", "text", "yaml"])
def test_lines_go_to_standard_error_in_the_requested_format(
    log_format: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STATEFLEET_LOG_FORMAT", raising=False)
    if log_format is not None:
        monkeypatch.setenv("STATEFLEET_LOG_FORMAT", log_format)
    monkeypatch.setattr(logs.sys, "stderr", sys.stderr)
    for _ in range(2):
        log_to_stderr("file:///f", "store_actor")
    capsys.readouterr()
    logging.getLogger("store_actors.actor.store_actor").info("begun")
    logging.getLogger("store_actors.actor.store_actor").debug("not logged")
    (text,) = capsys.readouterr().err.splitlines()
    if log_format == "text":
        assert text.endswith("INFO store_actors.actor.store_actor: begun")
    else:
        assert json.loads(text)["process"] == "store_actor"
