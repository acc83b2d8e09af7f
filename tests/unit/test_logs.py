"""What actors log: a line an event, with fields that are known, and nothing of anybody's data."""

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


def told(record: logging.LogRecord) -> dict[str, Any]:
    text = JsonLines({"fleet": "f", "process": "coordinator", "pid": 7}).format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def raised(error: BaseException) -> BaseException:
    """An error with a stack."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_line_has_its_fields_and_no_others() -> None:
    fields = about(StateStoreId("file:///f/clicks", 0, 3, "right"), version=0, epoch=5, run=None)
    found = told(line("shard %d", 3, **fields, key=CANARY, row={"user": CANARY}))
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "WARNING", "logger": "coordinator.test", "message": "shard 3", "fleet": "f", "process": "coordinator", "pid": 7,
        "state": "clicks", "partition": 3, "store": "right", "version": 0, "epoch": 5,
    }  # fmt: skip


def test_people_are_told_the_same_in_a_line() -> None:
    text = TextLines().format(line("shard %d", 3, state="clicks", version=4))
    assert text.endswith(" WARNING coordinator.test: shard 3 [state=clicks version=4]")


def test_an_error_of_ours_tells_what_it_is_about() -> None:
    error = raised(CorruptStateError("a file is damaged", file="clicks/0/3/4.delta", state="clicks", version=4))
    found = told(line("falling back: %s", error, error=error, epoch=9))
    assert found["message"] == f"falling back: CorruptStateError: {error}"
    assert (found["state"], found["version"], found["epoch"], found["error"]) == ("clicks", 4, 9, "CorruptStateError")
    assert "in raised" in found["exception"]
    assert found["exception"].endswith(str(error))


def unforeseen() -> BaseException:
    """An error whose text repeats what was being worked on, from another one that does."""
    with pytest.raises(pa.ArrowInvalid, match=CANARY) as cause:
        pa.array([CANARY]).cast(pa.int64())
    with pytest.raises(ValueError, match=CANARY) as told:
        raise ValueError(f"no number: {CANARY}") from cause.value
    return told.value


@pytest.mark.parametrize(
    "error",
    [unforeseen(), raised(InvalidRequestError("this is no user", value=CANARY))],
    ids=lambda one: str(type(one)),
)
@pytest.mark.parametrize("formatter", [JsonLines({}), TextLines()])
def test_no_text_of_an_error_is_told_that_may_repeat_values(error: BaseException, formatter: logging.Formatter) -> None:
    text = formatter.format(line("it failed: %s", error, error=error))
    assert CANARY not in text
    assert type(error).__name__ in text
    if error.__cause__ is not None:
        assert "ArrowInvalid" in text
        assert "in unforeseen" in text


@pytest.fixture
def loggers() -> Iterator[None]:
    """The loggers of the packages as they were, afterwards."""
    kept = [(logger, logger.handlers, logger.propagate, logger.level) for logger in map(logging.getLogger, PACKAGES)]
    yield
    for logger, handlers, propagate, level in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("loggers")
@pytest.mark.parametrize("wanted", [None, "json", "text", "yaml"])
def test_lines_go_to_standard_error_as_asked_for(
    wanted: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("STATEFLEET_LOG_FORMAT", raising=False)
    if wanted is not None:
        monkeypatch.setenv("STATEFLEET_LOG_FORMAT", wanted)
    monkeypatch.setattr(logs.sys, "stderr", sys.stderr)
    for _ in range(2):
        log_to_stderr("file:///f", "store_actor")
    capsys.readouterr()
    logging.getLogger("store_actors.actor").info("begun")
    logging.getLogger("store_actors.actor").debug("not told")
    (text,) = capsys.readouterr().err.splitlines()
    if wanted == "text":
        assert text.endswith("INFO store_actors.actor: begun")
    else:
        assert json.loads(text)["process"] == "store_actor"
