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
from tempfile import TemporaryFile

#: Prefix of the lines of a check's output that are findings; libraries print other lines.
_MARK = "finding "


class Outcome(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check.

    Attributes
    ----------
    advice
        What to do; empty if nothing has to be done.
    """

    check: str
    outcome: Outcome
    found: str
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
    with ThreadPoolExecutor(len(checks)) as threads:
        for findings in threads.map(lambda check: _run(check, limit_s), checks):
            yield from findings


def _run(check: tuple[str, str, Sequence[str]], limit_s: float) -> list[Finding]:
    name, module, arguments = check
    # Its outputs are files: a pipe would stay open for as long as a process that it started has it.
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        # In its own session, so that the processes that it starts end with it.
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
        was_ended = process.returncode is None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process that hangs in the kernel, on a file system that is gone, does not end when it is killed.
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        output.seek(0)
        marked = [json.loads(line.removeprefix(_MARK)) for line in output if line.startswith(_MARK)]
        findings = [Finding(**{**fields, "outcome": Outcome(fields["outcome"])}) for fields in marked]
        if was_ended:
            findings.append(
                Finding(
                    name,
                    Outcome.WRONG,
                    f"did not answer within {limit_s:.0f} s, and was ended",
                    "look whether its network or file system answers; what is told above was found before",
                )
            )
        elif process.returncode:
            errors.seek(0)
            last = ([line.strip() for line in errors if line.strip()] or ["without a word"])[-1]
            findings.append(
                Finding(
                    name,
                    Outcome.WRONG,
                    f"the check itself failed: {last}",
                    "please report this as an error of Statefleet",
                )
            )
    return findings
