"""Commands that check what there is, clean it, and end it: ``doctor``, ``verify``, ``gc``, ``drop``, ``stop``, ``warm``."""

from __future__ import annotations

import os
import sys
import textwrap
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer
from humanize import naturalsize

from coordinator.model.errors import InvalidRequestError
from statefleet.commands.options import Address, AsJson, DryRun, Name, State, Uri, chosen_states, find, readable_states
from statefleet.commands.output import WIDTH, print_json, print_table, print_text, progress
from statefleet.doctor.findings import Finding, Outcome, run_apart

if TYPE_CHECKING:
    from coordinator.storage.protocol import ObjectStore
    from statefleet.reads.verify import Damage, StateCheck

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


def verify(uri: Uri, name: Name = None, as_json: AsJson = False) -> None:
    """Check every file that a version needs.

    Each is read again; exit code 1 if one is damaged or missing. It reads
    the object store alone, so no fleet needs to run; one that runs is not held up.
    """
    from coordinator.storage.uris import open_object_store
    from statefleet.reads.verify import state_names

    objects = open_object_store(uri)
    states = chosen_states(state_names(objects), name)
    checks = [_checked(objects, state) for state in states]
    if as_json:
        print_json([{**asdict(check), "damages": [asdict(damage) for damage in check.damages]} for check in checks])
    else:
        _print_checks(checks)
    if any(check.damages for check in checks):
        raise typer.Exit(1)


def _checked(objects: ObjectStore, state: str) -> StateCheck:
    from statefleet.reads.verify import check_files, files_of

    files = files_of(objects, state)
    with progress(state, files.size, is_size=True) as show:
        return check_files(objects, files, show)


def _print_checks(checks: list[StateCheck]) -> None:
    print_table(
        ("state", "files", "read", "damaged"),
        [(check.name, check.files, naturalsize(check.size), len(check.damages)) for check in checks],
    )
    damages = [damage for check in checks for damage in check.damages]
    for damage in damages:
        print()
        _print_damage(damage)
    if not damages:
        print_text("every file that a retained version needs is there and whole")


def _print_damage(damage: Damage) -> None:
    print_text(f"{damage.kind} {damage.file}: {damage.problem}")
    if damage.shard is not None:
        print_text(
            f"of state {damage.state}, shard {damage.shard}, store {damage.store}, version {damage.version}", "  "
        )
        print_text(f"versions that cannot be read: {_ranges(damage.unreadable) or 'none'}", "  ")
    print_text(f"what to do: {damage.advice}", "  ")


def _ranges(versions: tuple[int, ...]) -> str:
    """Return versions as text, with consecutive ones as a range."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][-1] == version - 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def gc(
    uri: Uri, name: Name = None, address: Address = "auto", dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Let old versions go, delete needless files."""
    coordinator = find(uri, address)
    chosen = readable_states(coordinator, name)
    cleaned: dict[str, dict[str, Any]] = {}
    with progress("cleaning states", len(chosen)) as show:
        for state in chosen:
            cleaned[state] = coordinator.clean(state, dry_run=dry_run)
            show(len(cleaned))
    if as_json:
        print_json(cleaned)
        return
    oldest = [(state, *map(str, floor)) for state, result in cleaned.items() for floor in result["floors"]]
    files = [file for result in cleaned.values() for file in result["files"]]
    would = "would be " if dry_run else ""
    print_text(f"oldest version {would}raised of {len(oldest)} shard{'' if len(oldest) == 1 else 's'}")
    if oldest:
        print_table(("state", "partition", "store", "oldest version"), oldest)
    size = naturalsize(sum(file["bytes"] for file in files))
    print_text(f"{len(files)} file{'' if len(files) == 1 else 's'} {would}deleted, {size}")
    if files:
        print_table(
            ("file", "size", "age in s"), [(file["path"], naturalsize(file["bytes"]), file["age_s"]) for file in files]
        )


def drop(
    uri: Uri,
    state: State,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    over: Annotated[bool, typer.Option("--over", help="the query's program is gone, though nobody said so")] = False,
    address: Address = "auto",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """End a state for good: name, memory, files.

    It is refused while a query uses the state, or branches need it.
    """
    coordinator = find(uri, address)
    dropped = coordinator.drop(state, dry_run=True, is_over=over)
    summary = f"{state}: {dropped.versions} versions, {dropped.files} files, {naturalsize(dropped.file_bytes)}"
    if not dry_run:
        if not yes and not (sys.stdin.isatty() and typer.confirm(f"{summary}. Drop it for good?", err=True)):
            raise InvalidRequestError("nothing was dropped; say --yes where no user can be asked", state=state)
        dropped = coordinator.drop(state, dry_run=False, is_over=over)
    if as_json:
        print_json({**asdict(dropped), "dropped": not dry_run})
        return
    print_text(f"{summary}: {'would be dropped' if dry_run else 'dropped'}")
    if dropped.others:
        print_text(f"the other states of its query stay: {', '.join(dropped.others)}")


def stop(uri: Uri, address: Address = "auto", as_json: AsJson = False) -> None:
    """End the fleet's actors; state stays stored."""
    from coordinator.service.calls import RayActors
    from store_actors.actor.deploy import end_fleet

    coordinator = find(uri, address)
    ended = [actor["actor_name"] for actor in coordinator.status()["store_actors"] if actor["alive"]]
    end_fleet(RayActors(), coordinator)
    if as_json:
        print_json({"ended": ended})
    else:
        print_text("the fleet's actors have ended; every committed version stays in the object store")


def warm() -> None:
    """Compile the store actors' code, and the classes for Spark.

    It takes about a minute of a core, once; without it the first process that
    needs the code does it. For images and new nodes.
    """
    from store_actors.engine.compiled_code import is_compiled, warm_with_progress

    was_compiled = is_compiled()
    warm_with_progress()
    # A machine without Spark has no use for them.
    if find_spec("pyspark") is not None:
        from spark_jobs.jvm.build import present_jar

        present_jar()
    print_text(
        "the code was compiled already" if was_compiled else "compiled: what starts on this machine is quick now"
    )
