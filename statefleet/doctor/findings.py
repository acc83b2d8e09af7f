"""What checks find, and how they are run so that none can hang the others: each in a process of its own, for a limited time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum

__all__ = ["Finding", "Outcome", "emit", "run_apart"]

#: How a line of a check's output begins that tells a finding; libraries print lines of their own.
_MARK = "finding "


class Outcome(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a check.

    Attributes
    ----------
    check
        What was looked at.
    found
        What is there, and what that means.
    advice
        What to do; empty where nothing is to be done.
    """

    check: str
    outcome: Outcome
    found: str
    advice: str = ""


def emit(findings: Iterable[Finding]) -> None:
    """Print findings for the process that runs the checks, each as soon as it is there."""
    for finding in findings:
        print(_MARK + json.dumps(asdict(finding)), flush=True)


def run_apart(checks: Sequence[tuple[str, str, Sequence[str]]], limit_s: float) -> Iterator[Finding]:
    """Findings of checks that run side by side, in the order of the checks.

    Parameters
    ----------
    checks
        Of each what it looks at, the module that is run, and its arguments.
    limit_s
        How long each may take. What it had found by then counts.
    """
    answers = [_Answer(*check, limit_s) for check in checks]
    for answer in answers:
        yield from answer.findings()


class _Answer:
    """A check that runs."""

    def __init__(self, name: str, module: str, arguments: Sequence[str], limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s
        self._lines: list[str] = []
        self._errors: list[str] = []
        # A session of its own, so that whatever it starts ends with it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._readers = [
            _started(lambda: self._lines.extend(self._process.stdout or ())),
            _started(lambda: self._errors.extend(self._process.stderr or ())),
        ]
        self._was_ended = False
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        """Its time is over; it may have ended long ago, and something that it started still have its outputs."""
        self._was_ended = self._process.poll() is None
        if any(reader.is_alive() for reader in self._readers):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def findings(self) -> Iterator[Finding]:
        """What it found, once it has ended or its time is over."""
        for reader in self._readers:
            # One that hangs in the kernel, on a file system that is gone, does not end when it is killed.
            reader.join(self._limit_s + 5)
        self._timer.cancel()
        for line in list(self._lines):
            if line.startswith(_MARK):
                told = json.loads(line.removeprefix(_MARK))
                yield Finding(told["check"], Outcome(told["outcome"]), told["found"], told["advice"])
        if self._was_ended:
            yield Finding(
                self._name,
                Outcome.WRONG,
                f"did not answer within {self._limit_s:.0f} s, and was ended",
                "look whether its network or file system answers; what is told above was found before",
            )
        elif self._process.wait():
            last = next((line.strip() for line in reversed(self._errors) if line.strip()), "without a word")
            yield Finding(
                self._name,
                Outcome.WRONG,
                f"the check itself failed: {last}",
                "please report this as an error of Statefleet",
            )


def _started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
