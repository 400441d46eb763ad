"""NodeStandIn: a node of ours for tests. Runs the commands of pods as processes of this machine; images are ignored.

It speaks to an API server as a kubelet does (registers a Node, reports the status of the pods that a scheduler gave it,
ends those that are deleted, serves their logs), as far as EnvFleet's pods need it: containers that are not restarted,
plain variables, those from Secrets and annotations. It is no kubelet: no images, volumes, networks, limits or probes.
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
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.support.kubernetes.rest import Refused, Rest
from tests.support.kubernetes.stand_in_server import StandInServer

PULL_FAILS = "nowhere/"  # images of this "registry" cannot be pulled
NEVER_STARTED = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}  # its pod was deleted before


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class NodeStandIn:
    """A node. `rest` may do all that a kubelet may. With a certificate and key logs are served by https."""

    def __init__(self, rest: Rest, name="node-1", num_cpus=8, certificate: tuple[Path, Path] | None = None, env=None):
        self.name = name
        self._rest = rest
        self._env = env or {}
        self._logs = tempfile.TemporaryDirectory(prefix="ef-node-")
        # By uid of the pod and name of the container.
        self._processes: dict[tuple[str, str], subprocess.Popen] = {}
        self._unstarted: dict[tuple[str, str], dict] = {}
        self._started_at: dict[tuple[str, str], str] = {}
        self._ended_at: dict[tuple[str, str], str] = {}
        self._reported: dict[str, list[dict]] = {}  # states of containers, by uid
        self._killed_at: dict[int, float] = {}  # by process
        self._stops = threading.Event()
        self.is_away = False  # then it does not hear, and says nothing; its processes run on
        self.problem: Exception | None = None
        self._log_server = _log_server(Path(self._logs.name), certificate)
        self._register(num_cpus)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def pids(self) -> list[int]:
        return [process.pid for process in list(self._processes.values()) if process.poll() is None]

    def close(self) -> None:
        self._stops.set()
        self._thread.join(10)
        self._log_server.close()
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
                next_heartbeat_s = 0.0
                continue
            try:
                if time.monotonic() > next_heartbeat_s:
                    next_heartbeat_s = time.monotonic() + 10
                    self._heartbeat()
                pods = self._rest.items(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.name}")
                self._end_all_but({pod["metadata"]["uid"] for pod in pods})
                for pod in pods:
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
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now()}
        self._rest.merge_lists(f"/api/v1/nodes/{self.name}/status", {"status": {"conditions": [ready]}})

    def _tend(self, pod):
        uid, metadata = pod["metadata"]["uid"], pod["metadata"]
        has_ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if metadata.get("deletionTimestamp"):
            living = [process for process in self._of(uid) if process.poll() is None]
            for process in living:
                self._end(process, metadata.get("deletionGracePeriodSeconds") or 0)
            if living:
                return
            if not has_ended:
                self._report(pod, [self._state(uid, each["name"]) or NEVER_STARTED for each in _containers(pod)])
            self._rest.delete(self._path(pod), {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})
        elif not has_ended:
            states = [self._state(uid, each["name"]) or self._start(pod, each) for each in _containers(pod)]
            if self._reported.get(uid) != states or _is_marked(pod):
                self._report(pod, states)
                self._reported[uid] = states

    def _end_all_but(self, uids):
        """Pods that were removed without grace are not listed any more."""
        for (uid, _), process in self._processes.items():
            if uid not in uids and process.poll() is None:
                _kill(process)

    def _end(self, process, grace_s):
        """SIGTERM, later SIGKILL, to its process alone: what that has started is killed with it."""
        if process.pid not in self._killed_at:
            self._killed_at[process.pid] = time.monotonic() + grace_s
            process.terminate()
        elif time.monotonic() > self._killed_at[process.pid]:
            _kill(process)

    def _of(self, uid):
        return [process for (of, _), process in self._processes.items() if of == uid]

    def _state(self, uid, name):
        """Of a container that was started, or could not be; None: it was not tried yet."""
        process = self._processes.get((uid, name))
        if process is None:
            return self._unstarted.get((uid, name))
        if process.poll() is None:
            return {"running": {"startedAt": self._started_at[uid, name]}}
        if (uid, name) not in self._ended_at:
            self._ended_at[uid, name] = now()
            _kill(process)  # what it has started
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
        return {"terminated": ended | {"finishedAt": self._ended_at[uid, name]}}

    def _start(self, pod, container):
        key = (pod["metadata"]["uid"], container["name"])
        if container["image"].startswith(PULL_FAILS):
            message = f'Back-off pulling image "{container["image"]}": not found'
            return {"waiting": {"reason": "ImagePullBackOff", "message": message}}
        try:
            env = self._variables(pod, container)
        except Refused as refused:
            return {"waiting": {"reason": "CreateContainerConfigError", "message": str(refused)}}
        argv = [_expanded(each, env) for each in (*container["command"], *container.get("args", ()))]
        with open(Path(self._logs.name) / f"{pod['metadata']['name']}_{container['name']}", "wb") as log:
            try:
                self._processes[key] = subprocess.Popen(
                    argv,
                    env={"PATH": os.environ["PATH"], **self._env, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                state = {"exitCode": 128, "reason": "StartError", "message": str(error), "finishedAt": now()}
                self._unstarted[key] = {"terminated": state}
        self._started_at[key] = now()
        return self._state(*key)

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

    def _report(self, pod, states):
        statuses = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": "running" in state,
                "restartCount": 0,
                "state": state,
            }
            for container, state in zip(_containers(pod), states, strict=True)
        ]
        is_ready, phase = all("running" in state for state in states), _phase(states)
        reason = None if is_ready else "ContainersNotReady" if phase in ("Pending", "Running") else "PodCompleted"
        ready = {"status": str(is_ready), "reason": reason}
        status = {
            "phase": phase,
            "containerStatuses": sorted(statuses, key=lambda each: each["name"]),  # as a kubelet has them
            "conditions": [{"type": "Ready", **ready}, {"type": "ContainersReady", **ready}],
        }
        self._rest.merge_lists(f"{self._path(pod)}/status", {"status": status})

    def _path(self, pod):
        return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _containers(pod):
    return pod["spec"]["containers"]


def _phase(states):
    if any("waiting" in state for state in states):
        return "Pending"
    if any("running" in state for state in states):
        return "Running"
    return "Failed" if any(state["terminated"]["exitCode"] for state in states) else "Succeeded"


def _is_marked(pod):
    """The node controller took this node for lost, and has marked its pods."""
    conditions = pod["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "False" and not each.get("reason") for each in conditions)


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
            path = folder / "_".join(url.path.split("/")[3:5])
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            (tail,) = urllib.parse.parse_qs(url.query).get("tailLines", [len(lines)])
            body = b"".join(lines[-int(tail) :])
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
    return StandInServer(Handler, context)
