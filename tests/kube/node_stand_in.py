"""NodeStandIn: a node of ours for tests. Runs the commands of pods as processes of this machine; images are ignored.

It speaks to an API server as a kubelet does (registers a Node, reports the status of the pods that a scheduler gave it,
ends those that are deleted, serves their logs), as far as EnvFleet's pods need it: one container, plain variables,
those from Secrets and from annotations. It is no kubelet: no images, volumes, networks, limits or probes.
"""

import base64
import contextlib
import os
import re
import signal
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.parse
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rest import Refused, Rest

PULL_FAILS = "nowhere/"  # images of this "registry" cannot be pulled


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class NodeStandIn:
    """A node. `rest` may do all that a kubelet may. With a certificate and key logs are served by https."""

    def __init__(self, rest: Rest, name="node-1", num_cpus=8, certificate: tuple[Path, Path] | None = None, env=None):
        self.name = name
        self._rest = rest
        self._env = env or {}
        self._logs = tempfile.TemporaryDirectory(prefix="ef-node-")
        self._processes: dict[str, subprocess.Popen] = {}  # by uid of the pod
        self._killed_at: dict[str, float] = {}
        self._stops = threading.Event()
        self.is_away = False  # then it does not hear, and says nothing; its processes run on
        self.problem: Exception | None = None
        self._log_server = _log_server(Path(self._logs.name), certificate)
        self._register(num_cpus)
        self._threads = [
            threading.Thread(target=self._log_server.serve_forever, args=(0.02,), daemon=True),
            threading.Thread(target=self._run, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def pids(self) -> list[int]:
        return [process.pid for process in list(self._processes.values()) if process.poll() is None]

    def close(self) -> None:
        self._stops.set()
        self._log_server.shutdown()
        for thread in self._threads:
            thread.join(10)
        self._log_server.server_close()
        for process in self._processes.values():
            _kill(process)
            process.wait()
        self._logs.cleanup()
        assert self.problem is None, self.problem

    def _register(self, num_cpus):
        capacity = {"cpu": str(num_cpus), "memory": "64Gi", "pods": "100"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": {"kubernetes.io/hostname": self.name}},
        }
        with contextlib.suppress(Refused):  # it may be there from another test
            self._rest.post("/api/v1/nodes", node)
        self._rest.merge(
            f"/api/v1/nodes/{self.name}/status",
            {
                "status": {
                    "capacity": capacity,
                    "allocatable": capacity,
                    "conditions": [
                        {
                            "type": "Ready",
                            "status": "True",
                            "reason": "StandIn",
                            "message": "",
                            "lastHeartbeatTime": now(),
                            "lastTransitionTime": now(),
                        }
                    ],
                    "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": self._log_server.server_port}},
                }
            },
        )
        with contextlib.suppress(Refused):  # a controller may have tainted it before it was ready
            self._rest.merge(f"/api/v1/nodes/{self.name}", {"spec": {"taints": None}})

    def _run(self):
        next_heartbeat_s = 0.0
        while not self._stops.wait(0.05):
            if self.is_away:
                continue
            try:
                if time.monotonic() > next_heartbeat_s:
                    next_heartbeat_s = time.monotonic() + 10
                    self._heartbeat()
                for pod in self._rest.items(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.name}"):
                    try:
                        self._tend(pod)
                    except Refused as refused:
                        if refused.status not in (404, 409):  # it is gone, or has changed: the next look will show
                            raise
            except OSError:  # the API server is away: as a kubelet, go on with what is there
                continue
            except Exception as error:
                self.problem = error
                return

    def _heartbeat(self):
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        micro = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": micro}
        try:
            self._rest.merge(f"{path}/{self.name}", {"spec": spec})
        except Refused:
            with contextlib.suppress(Refused):
                lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self.name}}
                self._rest.post(path, lease | {"spec": spec})

    def _tend(self, pod):
        uid, metadata = pod["metadata"]["uid"], pod["metadata"]
        process = self._processes.get(uid)
        has_ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if metadata.get("deletionTimestamp"):
            if process is not None and process.poll() is None:
                self._end(uid, process, metadata.get("deletionGracePeriodSeconds") or 0)
                return
            if not has_ended:
                self._report_end(pod, process)
            self._rest.delete(self._path(pod), {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
        elif process is None and not has_ended:
            self._start(pod)
        elif process is not None and process.poll() is not None and not has_ended:
            self._report_end(pod, process)

    def _end(self, uid, process, grace_s):
        """SIGTERM, later SIGKILL, to its process alone: what that has started is killed with it."""
        if uid not in self._killed_at:
            self._killed_at[uid] = time.monotonic() + grace_s
            process.terminate()
        elif time.monotonic() > self._killed_at[uid]:
            _kill(process)

    def _start(self, pod):
        container = pod["spec"]["containers"][0]
        if container["image"].startswith(PULL_FAILS):
            message = f'Back-off pulling image "{container["image"]}": not found'
            self._report(pod, "Pending", {"waiting": {"reason": "ImagePullBackOff", "message": message}})
            return
        try:
            env = self._variables(pod, container)
        except Refused as refused:
            message = str(refused)
            self._report(pod, "Pending", {"waiting": {"reason": "CreateContainerConfigError", "message": message}})
            return
        argv = [_expanded(each, env) for each in (*container["command"], *container.get("args", ()))]
        with open(Path(self._logs.name) / pod["metadata"]["name"], "wb") as log:
            try:
                process = subprocess.Popen(
                    argv,
                    env={"PATH": os.environ["PATH"], **self._env, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                state = {"exitCode": 128, "reason": "StartError", "message": str(error), "finishedAt": now()}
                self._report(pod, "Failed", {"terminated": state})
                return
        self._processes[pod["metadata"]["uid"]] = process
        self._report(pod, "Running", {"running": {"startedAt": now()}})

    def _variables(self, pod, container):
        env = {}
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                of = source["secretKeyRef"]
                secret = self._rest.get(f"/api/v1/namespaces/{pod['metadata']['namespace']}/secrets/{of['name']}")
                env[variable["name"]] = base64.b64decode(secret["data"][of["key"]]).decode()
            elif "fieldRef" in source:
                key = re.fullmatch(r"metadata\.annotations\['(.+)'\]", source["fieldRef"]["fieldPath"]).group(1)
                env[variable["name"]] = pod["metadata"]["annotations"][key]
            else:
                env[variable["name"]] = _expanded(variable.get("value", ""), env)
        return env

    def _report_end(self, pod, process):
        if process is None:  # deleted before it was started
            self._report(
                pod,
                "Failed",
                {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "finishedAt": now()}},
            )
            return
        _kill(process)  # what it has started
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        state = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
        self._report(pod, "Failed" if code else "Succeeded", {"terminated": state})

    def _report(self, pod, phase, state):
        container = pod["spec"]["containers"][0]
        status = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": "running" in state,
            "restartCount": 0,
            "state": state,
        }
        self._rest.merge(f"{self._path(pod)}/status", {"status": {"phase": phase, "containerStatuses": [status]}})

    def _path(self, pod):
        return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _expanded(text, env):
    """As Kubernetes does: $(NAME) is a variable, $$ a dollar."""
    return re.sub(
        r"\$(\$|\((\w+)\))",
        lambda found: "$" if found.group(1) == "$" else env.get(found.group(2), found.group(0)),
        text,
    )


def _kill(process):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _log_server(folder, certificate):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            # /containerLogs/<namespace>/<pod>/<container>
            url = urllib.parse.urlsplit(self.path)
            path = folder / url.path.split("/")[3]
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            (tail,) = urllib.parse.parse_qs(url.query).get("tailLines", [len(lines)])
            body = b"".join(lines[-int(tail) :])
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    return server
