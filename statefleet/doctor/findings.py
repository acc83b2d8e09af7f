"""Findings of checks, and the processes that run them: each check has its own, for a limited time, so that none can hang the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import repeat

#: Prefix of the lines of a check's output that are findings; libraries print other lines.
_MARK = "finding "
#: How long a killed check may take to end, in seconds; one that hangs in the kernel, on a file system that is gone, does not end.
_KILL_S = 5.0


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


def ok(check: str, found: str) -> Finding:
    return Finding(check, Outcome.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Outcome.WARNING, found, advice)


def wrong(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Outcome.WRONG, found, advice)


def emit(findings: Iterable[Finding]) -> None:
    """Print findings for the process that runs the checks, each at once."""
    for finding in findings:
        print(_MARK + json.dumps(asdict(finding)), flush=True)


def run_apart(checks: Sequence[tuple[str, str, Sequence[str]]], limit_s: float) -> Iterator[Finding]:
    """Yield the findings of checks (name, module and arguments) that run concurrently, in their order.

    Each check may take `limit_s` seconds; its findings up to then are kept.
    """
    processes = [
        # Each in its own session, so that the processes that it starts end with it.
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for _, module, arguments in checks
    ]
    with ThreadPoolExecutor(len(checks)) as pool:
        try:
            for findings in pool.map(_findings, [name for name, *_ in checks], processes, repeat(limit_s)):
                yield from findings
        finally:
            # Some still run if the caller was interrupted; it would wait for them on leaving the pool.
            for process in processes:
                if process.poll() is None:
                    _kill(process)


def _findings(name: str, process: subprocess.Popen[bytes], limit_s: float) -> list[Finding]:
    """Return the findings of a check, once it has ended or its time is over."""
    was_ended = False
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # It may have ended while a process that it started has its outputs open.
        was_ended = process.poll() is None
        _kill(process)
        try:
            output, errors = process.communicate(timeout=_KILL_S)
        except subprocess.TimeoutExpired as error:
            output, errors = error.stdout or b"", error.stderr or b""
    findings = []
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            fields = json.loads(line.removeprefix(_MARK))
            findings.append(Finding(fields["check"], Outcome(fields["outcome"]), fields["found"], fields["advice"]))
    if was_ended:
        advice = "look whether its network or file system answers; what is told above was found before"
        findings.append(wrong(name, f"did not answer within {limit_s:.0f} s, and was ended", advice))
    elif process.returncode:
        lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
        text = f"the check itself failed: {lines[-1] if lines else 'without a word'}"
        findings.append(wrong(name, text, "please report this as an error of Statefleet"))
    return findings


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
