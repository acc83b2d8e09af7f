"""``doctor``: what is wrong with the surroundings, and what to do."""

from __future__ import annotations

import os
import textwrap
from dataclasses import asdict
from typing import Annotated

import typer

from statefleet.commands.options import Address, AsJson
from statefleet.commands.output import WIDTH, print_json, progress
from statefleet.doctor.findings import Finding, Outcome, run_apart

__all__ = ["doctor", "report"]

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
    given = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    checks = [
        ("this machine", "statefleet.doctor.machine", []),
        ("Ray cluster", "statefleet.doctor.cluster", [given, uri or ""]),
        *([("object store", "statefleet.doctor.storage", [uri])] if uri else []),
    ]
    found: list[Finding] = []
    with progress("looking", None):
        found.extend(run_apart(checks, _LIMIT_S))
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        print(report(found))
    if any(one.outcome is Outcome.WRONG for one in found):
        raise typer.Exit(1)


def report(found: list[Finding]) -> str:
    """Findings as text: each with what it means, and what to do."""
    label = max(len(one.outcome) for one in found) + 2
    indent = " " * label
    lines: list[str] = []
    for one in found:
        told = f"{one.outcome.ljust(label)}{one.check}: {one.found}"
        lines += textwrap.wrap(told, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        if one.advice:
            lines += textwrap.wrap(
                f"what to do: {one.advice}",
                WIDTH,
                initial_indent=indent,
                subsequent_indent=indent,
                break_on_hyphens=False,
            )
    counts = {outcome: sum(one.outcome is outcome for one in found) for outcome in Outcome}
    lines += ["", ", ".join(f"{count} {outcome}" for outcome, count in counts.items())]
    return "\n".join(lines)
