"""Kubernetes on this machine: etcd, API server, controllers, scheduler and a kubelet with containerd, as one node.

Everything is at one address, that of a bridge which the pods' network is made of, and which no other machine reaches. There is neither
kube-proxy nor DNS. Needs root, control groups, and of Debian containerd, runc, containernetworking-plugins and iproute2.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from tests.clocks import until
from tests.go_tool import cache_folder
from tests.image.containers import Containers
from tests.image.containers import why_not as why_no_image
from tests.kubernetes.images import PAUSE, build_images
from tests.kubernetes.programs import kubernetes_programs
from tests.processes import end_process, end_with_parent, free_ports

#: Of benchmarks of networks only (RFC 2544), so that no service is there.
ADDRESS, _NETWORK, _BRIDGE = "198.18.77.1", "198.18.77.0/24", "statefleet-kube"
_PLUGINS = Path("/usr/lib/cni")
_TOOLS = ("containerd", "ctr", "runc", "ip", "openssl")
#: Settings of the kernel.
_SET_BY_OTHERS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
                  "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes", "net/ipv4/ip_forward")  # fmt: skip
_NODE = "node"
_START_S = 120
#: Starts one of the programs with options.
Start: TypeAlias = Callable[[str, Mapping[str, Any]], None]


def why_not() -> str:
    """Return what keeps Kubernetes from running here; nothing if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None] + ["cni"] * (not _PLUGINS.is_dir())
    return why_no_image() or (missing and f"these are not installed: {', '.join(missing)}") or ""


class Cluster:
    """A cluster of one node.

    Parameters
    ----------
    folder
        Temporary folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._program, self._pause = kubernetes_programs()
        self._port = free_ports(1)[0]
        #: Of the API server.
        self.url = f"https://{ADDRESS}:{self._port}"
        self.authority = folder / "certificates" / "apiserver.crt"
        self._kubeconfig = folder / "kubeconfig"
        self._containerd = folder / "containerd.sock"
        #: kubectl for an administrator.
        self.kubectl_command = [str(self._program), "kubectl", f"--kubeconfig={self._kubeconfig}"]
        #: Images stay there.
        self._storage = cache_folder() / "kubernetes"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run it while the context lasts."""
        images = build_images(self.folder, self._pause)
        with ExitStack() as stack:
            stack.enter_context(_settings_of_kernel())
            stack.enter_context(_bridge())
            stack.callback(self._remove_remains)

            def start(name: str, options: Mapping[str, Any]) -> None:
                stack.enter_context(self._process(name, options))

            self._start_containers(start, images)
            stack.callback(self._remove_containers)
            self._start_servers(start)
            until(lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", _START_S, every_s=0.5)
            node = {"hostname-override": _NODE, "node-ip": ADDRESS, "root-dir": self.folder / "kubelet"}
            start("kubelet", {"config": self._kubelet(), "kubeconfig": self._kubeconfig, **node})
            until(self._is_ready, _START_S, every_s=0.5)
            yield
            self.kubectl("delete", "pods", "--all", "--grace-period=1")

    def kubectl(self, *words: str, check: bool = True, given: str | None = None) -> str:
        """Return what kubectl prints; raises subprocess.CalledProcessError if it fails, and has to succeed."""
        done = subprocess.run(
            [*self.kubectl_command, *words], capture_output=True, text=True, check=False, input=given, timeout=120
        )
        if check and done.returncode:
            print(done.stderr)
            done.check_returncode()
        return done.stdout.strip()

    def _is_ready(self) -> bool:
        status = "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}"
        # The account that pods have by default is made a moment later.
        account = self.kubectl("get", "serviceaccount", "default", "--output=name", check=False)
        return account != "" and self.kubectl("get", "nodes", f"--output={status}", check=False) == "True"

    @contextmanager
    def _process(self, name: str, options: Mapping[str, Any]) -> Iterator[None]:
        program = [name] if name == "containerd" else [str(self._program), name]
        command = [*program, *(f"--{option}={value}" for option, value in options.items())]
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder, preexec_fn=end_with_parent
            )
            try:
                yield
            finally:
                end_process(process, 20)

    # -- containers ---------------------------------------------------------------------------------------------------

    def _start_containers(self, start: Start, images: Mapping[str, str]) -> None:
        networks = self.folder / "networks"
        networks.mkdir()
        network = {"type": "bridge", "bridge": _BRIDGE, "isGateway": True, "ipam": {"type": "host-local", "subnet": _NETWORK,
                   "dataDir": f"{self.folder}/addresses", "gateway": ADDRESS, "routes": [{"dst": "0.0.0.0/0"}]}}  # fmt: skip
        whole = {"cniVersion": "0.4.0", "name": "pods", "plugins": [network]}
        (networks / "pods.conflist").write_text(json.dumps(whole))
        settings = self.folder / "containerd.toml"
        settings.write_text(f"""
version = 2
root = "{self._storage}/containerd"
state = "{self.folder}/containerd"
[grpc]
address = "{self._containerd}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
# Without the capability for it no process gets a lower score than its parent's.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{_PLUGINS}"
conf_dir = "{networks}"
""")
        start("containerd", {"config": settings})
        until(lambda: self._containers("version", check=False) != "", _START_S, every_s=0.5)
        self._remove_containers()
        self._import_images(images)

    def _import_images(self, wanted: Mapping[str, str]) -> None:
        """Give containerd the images that it does not have, by the id of each."""
        stamp = self._storage / "imported.json"
        had = json.loads(stamp.read_text()) if stamp.exists() else {}
        for image, number in wanted.items():
            if had.get(image) != number:
                archive = self.folder / "image.tar"
                Containers(self.folder).save(image, archive)
                self._containers("images", "import", str(archive))
                archive.unlink()
        stamp.write_text(json.dumps(wanted))

    def _containers(self, *words: str, check: bool = True) -> str:
        command = ["ctr", "--address", str(self._containerd), "--namespace", "k8s.io", *words]
        errors = None if check else subprocess.DEVNULL
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=check).stdout.strip()

    def _remove_containers(self) -> None:
        """Remove what is left of pods; by itself containerd leaves them running."""
        for container in self._containers("containers", "list", "--quiet").split():
            self._containers("tasks", "delete", "--force", container, check=False)
            self._containers("containers", "delete", container, check=False)

    def _remove_remains(self) -> None:
        """Unmount what the kubelet has mounted, and remove the control groups of pods, from the inmost on."""
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for folder in sorted((folder for folder in mounted if folder.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", folder], check=True)
        for top in Path("/sys/fs/cgroup").glob("*/kubepods"):
            for group in [*sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True), top]:
                with suppress(OSError):  # somebody else's, with a process in it
                    group.rmdir()

    # -- servers ------------------------------------------------------------------------------------------------------

    def _start_servers(self, start: Start) -> None:
        etcd, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        urls = {"listen-client-urls": etcd, "advertise-client-urls": etcd, "listen-peer-urls": peer}
        urls |= {"initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}"}
        start("etcd", {"data-dir": self.folder / "etcd", "unsafe-no-fsync": "true", **urls})
        key, token = self.folder / "accounts.key", secrets.token_hex(16)
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (tokens := self.folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
        of_accounts = {
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
        }
        at = {"bind-address": ADDRESS, "advertise-address": ADDRESS, "secure-port": self._port}
        access = {"cert-dir": self.authority.parent, "token-auth-file": tokens, "authorization-mode": "RBAC"}
        network = {"service-cluster-ip-range": "10.96.0.0/16", "kubelet-preferred-address-types": "InternalIP"}
        start("kube-apiserver", {"etcd-servers": etcd, **at, **access, **of_accounts, **network})
        until(self.authority.exists, _START_S)
        self._write_kubeconfig(token)
        client = {"kubeconfig": self._kubeconfig, "leader-elect": "false", "secure-port": 0}
        accounts = {"service-account-private-key-file": key, "root-ca-file": self.authority}
        start("kube-controller-manager", {**client, **accounts, "cert-dir": self.folder / "controllers"})
        start("kube-scheduler", client)

    def _write_kubeconfig(self, token: str) -> None:
        server = {"server": self.url, "certificate-authority": str(self.authority)}
        context = {"cluster": "here", "user": "admin"}
        settings = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": context}],
            "current-context": "here",
        }
        self._kubeconfig.write_text(json.dumps(settings))

    def _kubelet(self) -> Path:
        """Write the kubelet's settings; return their file."""
        settings: Mapping[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": ADDRESS,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self._containerd}",
            "cgroupDriver": "cgroupfs",
            "failSwapOn": False,
            "failCgroupV1": False,
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "readOnlyPort": 0,
            "healthzPort": 0,
            "podLogsDir": f"{self.folder}/logs",
        }
        file = self.folder / "kubelet.json"
        file.write_text(json.dumps(settings))
        return file


@contextmanager
def _settings_of_kernel() -> Iterator[None]:
    """Put back what the kubelet and the bridge's plugin set for the whole machine."""
    files = [Path("/proc/sys", name) for name in _SET_BY_OTHERS]
    before = [file.read_text() for file in files]
    try:
        yield
    finally:
        for file, value in zip(files, before, strict=True):
            if file.read_text() != value:
                file.write_text(value)


@contextmanager
def _bridge() -> Iterator[None]:
    """Have the bridge before the first pod has it made: servers listen at its address."""
    for words in (f"add {_BRIDGE} type bridge", f"set {_BRIDGE} up"):
        subprocess.run(["ip", "link", *words.split()], check=True)
    try:
        subprocess.run(["ip", "address", "add", f"{ADDRESS}/24", "dev", _BRIDGE], check=True)
        yield
    finally:
        subprocess.run(["ip", "link", "delete", _BRIDGE], check=True)
