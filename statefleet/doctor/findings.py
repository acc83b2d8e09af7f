"""Findings of checks, and the processes that run them: each check has its own, for a limited time, so that none can hang the others."""

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

#: Prefix of the lines of a check's output that are findings; libraries print other lines.
_MARK = "finding "


class Outcome(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check."""

    check: str
    outcome: Outcome
    found: str
    #: What to do; empty if nothing has to be done.
    advice: str = ""


def emit(findings: Iterable[Finding]) -> None:
    """Print findings for the process that runs the checks, each at once."""
    for finding in findings:
        print(_MARK + json.dumps(asdict(finding)), flush=True)


def run_apart(checks: Sequence[tuple[str, str, Sequence[str]]], limit_s: float) -> Iterator[Finding]:
    """Yield the findings of checks that run concurrently, in the order of the checks.

    Parameters
    ----------
    checks
        Name, module and arguments of each check.
    limit_s
        How long each check may take, in seconds. Findings up to then are kept.
    """
    running = [_RunningCheck(*check, limit_s) for check in checks]
    for check in running:
        yield from check.findings()


class _RunningCheck:
    def __init__(self, name: str, module: str, arguments: Sequence[str], limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s
        self._lines: list[str] = []
        self._errors: list[str] = []
        # In its own session, so that the processes that it starts end with it.
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
        """End the check when its time is over; it may have ended while a process that it started has its outputs open."""
        self._was_ended = self._process.poll() is None
        if any(reader.is_alive() for reader in self._readers):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def findings(self) -> Iterator[Finding]:
        """Yield the findings, once the check has ended or its time is over."""
        for reader in self._readers:
            # A process that hangs in the kernel, on a file system that is gone, does not end when it is killed.
            reader.join(self._limit_s + 5)
        self._timer.cancel()
        for line in list(self._lines):
            if line.startswith(_MARK):
                fields = json.loads(line.removeprefix(_MARK))
                yield Finding(fields["check"], Outcome(fields["outcome"]), fields["found"], fields["advice"])
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
