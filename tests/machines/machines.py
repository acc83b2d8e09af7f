"""Machines in a box: network namespaces of this machine, each with an address, processes, shared memory, folders of its own and sshd.

They share the processor, the file system below their own folders and the clock. What is real is what lies between them: a link that
can be pulled, an address without an answer, processes that end all at once. Needs root, iproute2, util-linux, rsync and
openssh-server.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: The user that logs in. Root by another name, so that the home is not that of the user who runs the tests.
USER = "fleet"
_HOME = Path("/home") / USER
#: Folder that all machines see.
SHARED = Path("/mnt")
#: Of documentation only (RFC 5737), so that no service is there; the first that this machine has no link to.
_NETWORKS = ("198.51.100", "203.0.113", "192.0.2")
_TOOLS = ("ip", "unshare", "setpriv", "rsync", "ssh", "ssh-keygen", "/usr/sbin/sshd")
_ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """Return what keeps machines from being made here; nothing if they can be made."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing:
        return f"these are not installed (Debian: iproute2, util-linux, rsync, openssh-server): {', '.join(missing)}"
    if not Path("/mnt").is_dir() or not Path("/home").is_dir():
        return "there is no /mnt or no /home to give the machines folders of their own at"
    tried = subprocess.run(
        ["unshare", "-n", "-m", "-u", "-i", "-p", "-f", "true"], capture_output=True, text=True, check=False
    )
    return f"this kernel gives no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def _run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{shlex.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done  # type: ignore[no-any-return]


class Machine:
    """A machine, off at first.

    Parameters
    ----------
    number
        Its place in the network, from 1.
    room
        What all machines have in common.
    """

    def __init__(self, number: int, room: Machines) -> None:
        self.name, self.address = f"{room.name}m{number}", f"{room.network}.{10 + number}"
        self.disk = room.folder / self.name
        self._room = room
        self._outside = f"{room.name}v{number}"
        self._init: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Switch it on; its folders are as it left them."""
        for folder in ("home", "tmp", "venv", "work"):
            (self.disk / folder).mkdir(parents=True, exist_ok=True)
        inside = f"{self._outside}p"
        _run("ip", "netns", "add", self.name)
        _run("ip", "link", "add", self._outside, "type", "veth", "peer", "name", inside)
        _run("ip", "link", "set", inside, "netns", self.name, "name", "eth0")
        _run("ip", "link", "set", self._outside, "master", self._room.name, "up")
        for command in (f"addr add {self.address}/24 dev eth0", "link set lo up", "link set eth0 up"):
            _run("ip", "-n", self.name, *command.split())
        log = (self.disk / "console").open("ab")
        # It ends with this process, however that ends.
        spaces = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "-m",
            "-u",
            "-i",
            "-p",
            "-f",
            "--kill-child",
            "--mount-proc",
        ]
        self._init = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *spaces, "bash", "-ec", self._start_up()],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        self._wait_for_sshd()

    def _start_up(self) -> str:
        """Return what the machine runs first, as a shell's text."""
        room, disk = self._room.folder, self.disk
        venv = _HOME / "statefleet" / ".venv"
        return f"""
            hostname {self.name}
            mount --bind {self._room.shared} {SHARED}
            mount -t tmpfs home /home && mkdir {_HOME}
            mount --bind {disk}/home {_HOME}
            mkdir -p {venv}
            mount -t overlay venv -o lowerdir={room}/image:{Path(sys.prefix)},upperdir={disk}/venv,workdir={disk}/work {venv}
            for file in hosts passwd resolv.conf; do mount --bind {room}/$file /etc/$file; done
            mkdir -p /run/sshd && mount -t tmpfs run /run && mkdir /run/sshd
            mount -t tmpfs shm /dev/shm
            mount --bind {disk}/tmp /tmp
            exec /usr/sbin/sshd -D -e -f /etc/passwd.d 2>&1
        """.replace("/etc/passwd.d", str(SHARED / ".machines" / "sshd_config"))

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + 20
        while subprocess.run(
            ["bash", "-c", f"</dev/tcp/{self.address}/22"], capture_output=True, check=False
        ).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not boot: {(self.disk / 'console').read_text()}")
            time.sleep(0.1)

    def end(self) -> None:
        """Pull its plug: all its processes end at once."""
        if self._init is not None:
            self._init.send_signal(signal.SIGKILL)
            self._init.wait()
            self._init = None
        for command in (("link", "del", self._outside), ("netns", "del", self.name)):
            subprocess.run(["ip", *command], capture_output=True, check=False)

    def cut(self) -> None:
        """Pull its network cable: its processes continue, and no machine hears of them."""
        _run("ip", "link", "set", self._outside, "down")

    def heal(self) -> None:
        """Plug the cable in again."""
        _run("ip", "link", "set", self._outside, "up")

    def ssh(self, command: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run a command on it as its user does."""
        return _run(*self._room.ssh, f"{USER}@{self.address}", command, **options)

    def processes(self, name: bytes) -> list[int]:
        """Return the ids of its processes that are called so: seen from outside, without its link."""
        assert self._init is not None
        (first,) = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        ids = []
        for process in Path(f"/proc/{first}/root/proc").iterdir():
            # One that has ended meanwhile has no name any more.
            with contextlib.suppress(OSError):
                if process.name.isdigit() and name in (process / "cmdline").read_bytes():
                    ids.append(int(process.name))
        return ids


class Machines:
    """Several machines on one network.

    Parameters
    ----------
    folder
        Where their disks and what they share are.
    count
        How many.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.name = folder, f"sf{os.getpid()}"
        routes = _run("ip", "route").stdout
        self.network = next(network for network in _NETWORKS if network not in routes)
        self.shared, self.key = folder / "shared", folder / "key"
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "IdentitiesOnly=yes")
        self.ssh = ["ssh", "-n", "-i", str(self.key), *(part for option in options for part in ("-o", option))]
        self.all: Sequence[Machine] = [Machine(number, self) for number in range(1, count + 1)]

    @contextmanager
    def running(self) -> Iterator[Sequence[Machine]]:
        """The machines, booted."""
        self._make_common()
        _remove_left_over()
        try:
            _run("ip", "link", "add", self.name, "type", "bridge")
            _run("ip", "addr", "add", f"{self.network}.1/24", "dev", self.name)
            _run("ip", "link", "set", self.name, "up")
            for machine in self.all:
                machine.boot()
            yield self.all
        finally:
            for machine in self.all:
                machine.end()
            subprocess.run(["ip", "link", "del", self.name], capture_output=True, check=False)

    def _make_common(self) -> None:
        hidden = self.shared / ".machines"
        hidden.mkdir(parents=True)
        for key in (self.key, hidden / "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
        shutil.copy(self.key.with_suffix(".pub"), hidden / "authorized_keys")
        mounted = SHARED / ".machines"
        (hidden / "sshd_config").write_text(
            f"HostKey {mounted}/host_key\nAuthorizedKeysFile {mounted}/authorized_keys\nPidFile none\nUsePAM no\n"
            "StrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\nUseDNS no\n"
        )
        names = "".join(f"{machine.address} {machine.name}\n" for machine in self.all)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        # No server: a name that is not in the file is unknown at once, not after a minute.
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        # First: ssh looks for its home by its number, not by the environment.
        (self.folder / "passwd").write_text(f"{USER}:x:0:0::{_HOME}:/bin/bash\n{Path('/etc/passwd').read_text()}")
        self._make_image()

    def _make_image(self) -> None:
        """Make what `./run setup` would make of this environment in the user's home: the scripts, the package and the stamp.

        Packages need not be installed once a machine: the environment that runs the tests lies below, read only.
        """
        home, image, environment = _HOME / "statefleet", self.folder / "image", Path(sys.prefix)
        (image / "bin").mkdir(parents=True)
        for script in (environment / "bin").iterdir():
            if (
                script.is_file()
                and not script.is_symlink()
                and script.read_bytes().startswith(f"#!{environment}/bin/".encode())
            ):
                copy = image / "bin" / script.name
                copy.write_text(script.read_text().replace(f"{environment}/bin/", f"{home}/.venv/bin/", 1))
                copy.chmod(0o755)
        packages = Path(os.path.relpath(os.__file__, sys.base_prefix)).parent / "site-packages"
        for finder in (environment / packages).glob("__editable___statefleet_*_finder.py"):
            (image / packages).mkdir(parents=True, exist_ok=True)
            (image / packages / finder.name).write_text(_moved(finder.read_text(), home))
        inputs = ("requirements-build.lock", "requirements.lock", "pyproject.toml")
        digest = hashlib.sha256(
            f"{home}\n".encode() + b"".join((_ROOT / file).read_bytes() for file in inputs)
        ).hexdigest()
        (image / ".set-up").write_text(f"{digest}  -\n")


def _remove_left_over() -> None:
    """Remove networks of machines whose tests were killed."""
    for name in _run("ip", "netns", "list").stdout.split():
        owner = re.fullmatch(r"(sf(\d+))m\d+", name)
        if owner and not Path(f"/proc/{owner[2]}").exists():
            for command in (("netns", "del", name), ("link", "del", owner[1])):
                subprocess.run(["ip", *command], capture_output=True, check=False)


def _moved(finder: str, home: Path) -> str:
    """Return the finder of an editable package, with the package at another path."""
    lines = []
    for line in finder.splitlines():
        if line.startswith("MAPPING"):
            packages = ("benchmarks", "coordinator", "spark_jobs", "statefleet", "store_actors")
            line = f"MAPPING: dict[str, str] = { {package: str(home / package) for package in packages} }"
        lines.append(line)
    return "\n".join(lines)
