"""``doctor``: problems of the machine, the cluster and the object store, and what to do."""

from __future__ import annotations

import os
import textwrap
from dataclasses import asdict
from typing import Annotated

import typer

from statefleet.commands.options import Address, AsJson
from statefleet.commands.output import WIDTH, print_json, progress
from statefleet.doctor.findings import Finding, Outcome, run_apart

#: How long a check may take, in seconds; Ray gives up a cluster that does not answer after ten.
_LIMIT_S = 90.0


def doctor(
    uri: Annotated[
        str | None,
        typer.Argument(metavar="[URI]", help="a fleet's URI, whose object store and fleet are looked at, too"),
    ] = None,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """What is wrong around a fleet, and what to do.

    Java, Python, packages, Ray and its nodes, RayDP, ports, memory, disks; of a URI also its
    object store with its conditional puts (below _probe, which is left as it was), and its
    fleet. Exit code 1 if something is wrong.
    """
    cluster = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    checks = [
        ("this machine", "statefleet.doctor.machine", []),
        ("Ray cluster", "statefleet.doctor.cluster", [cluster, uri or ""]),
        *([("object store", "statefleet.doctor.storage", [uri])] if uri else []),
    ]
    findings: list[Finding] = []
    with progress("looking", None):
        findings.extend(run_apart(checks, _LIMIT_S))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        print(report(findings))
    if any(finding.outcome is Outcome.WRONG for finding in findings):
        raise typer.Exit(1)


def report(findings: list[Finding]) -> str:
    """Return findings as text, each with its meaning and advice."""
    label = max(len(finding.outcome) for finding in findings) + 2
    indent = " " * label
    lines: list[str] = []
    for finding in findings:
        text = f"{finding.outcome.ljust(label)}{finding.check}: {finding.found}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        if finding.advice:
            lines += textwrap.wrap(
                f"what to do: {finding.advice}",
                WIDTH,
                initial_indent=indent,
                subsequent_indent=indent,
                break_on_hyphens=False,
            )
    counts = {outcome: sum(finding.outcome is outcome for finding in findings) for outcome in Outcome}
    lines += ["", ", ".join(f"{count} {outcome}" for outcome, count in counts.items())]
    return "\n".join(lines)
