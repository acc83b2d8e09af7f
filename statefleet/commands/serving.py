"""The command that serves: ``serve-sql``."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from statefleet.commands.options import Address, AsJson, Offline, Uri, open_states
from statefleet.commands.output import print_json, print_text


def serve_sql(
    uri: Uri,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond the loopback it takes a token and TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 5433,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the token, by default STATEFLEET_SQL_TOKEN of the environment")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="certificate (PEM): connections are encrypted")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="its key (PEM)")] = None,
    rows: Annotated[int, typer.Option(min=1, help="most rows of a result")] = 100_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="most time of a statement")] = 60.0,
    connections: Annotated[int, typer.Option(min=1, help="most clients at once")] = 100,
    offline: Offline = False,
    address: Address = "auto",
    as_json: AsJson = False,
) -> None:
    """Serve states to clients of PostgreSQL.

    It runs until it is interrupted. The password of every user is the token.
    """
    from coordinator.model.errors import InvalidRequestError
    from coordinator.runtime.runtime import freeze_imports

    token = None
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(
                "the token cannot be read; nothing is served", file=str(token_file), cause=error
            ) from error
    fleet = open_states(uri, address, offline=offline)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with fleet.serve_sql(
        host=host,
        port=port,
        token=token,
        tls_cert=tls_cert,
        tls_key=tls_key,
        rows=rows,
        seconds=seconds,
        connections=connections,
    ) as served:
        if as_json:
            print_json({"url": served.url})
        else:
            print_text(f"{served.url} (until it is interrupted)")
        sys.stdout.flush()
        freeze_imports()
        ended.wait()
