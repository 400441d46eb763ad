"""ApiStandIn: an API server of ours for tests, on loopback, with small controllers behind it.

No real API server could be run where EnvFleet was written, so this one, written from what Kubernetes documents, stands
in: what passes here is not proven to pass there. It speaks as much of the REST API as the official client needs for
EnvFleet's objects: create, read, list with selectors, merge patches, deletion with propagation, grace and finalizers,
pod logs, evictions, Roles, strict fields. Behind it: a Job controller (Indexed and plain Jobs, back-off, limits, pod
failure policy, size changes, suspension, deadlines, time to live), a scheduler that counts CPUs, a node controller, a
garbage collector, quotas of pods and PodSecurity. It refuses what a real server is known to refuse. Back-offs are
twenty times shorter, so that tests do not wait for them.
"""

import base64
import copy
import re
import secrets
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from datetime import UTC, datetime

from tests.support.kubernetes.admission_stand_in import quota_refusal, security_refusal
from tests.support.kubernetes.api_handler import ApiHandler
from tests.support.kubernetes.field_stand_in import checked, merged
from tests.support.kubernetes.job_stand_in import (
    INDEX,
    HttpError,
    JobBook,
    check_job,
    check_job_change,
    index_of,
    invalid,
)
from tests.support.kubernetes.rest import Rest
from tests.support.kubernetes.stand_in_server import StandInServer

TRACKING = "batch.kubernetes.io/job-tracking"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
KINDS = {
    "namespaces": "Namespace",
    "nodes": "Node",
    "pods": "Pod",
    "secrets": "Secret",
    "events": "Event",
    "resourcequotas": "ResourceQuota",
    "serviceaccounts": "ServiceAccount",
    "jobs": "Job",
    "roles": "Role",
    "rolebindings": "RoleBinding",
    "leases": "Lease",
}
ROUTE = re.compile(
    r"/(?:api|apis/(?P<group>[a-z0-9.]+))/v1(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ApiStandIn:
    """A server and its controllers. Users are made with `user()`; the administrator may do everything."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str, str], dict] = {}  # by resource, namespace, name
        self.is_down = False  # then it closes every connection
        self.speaks = threading.Event()  # until then it takes requests, but does not answer
        self.speaks.set()
        self.problem: Exception | None = None
        self.silent_nodes: set[str] = set()  # names: the node controller has not heard of them for too long
        self.field_validations: dict[str, list[str]] = {}  # what each user has asked for, of all creates and patches
        self._users: dict[str, str] = {}  # by token
        self._books: dict[str, JobBook] = {}  # by uid of the Job
        self._stops = threading.Event()
        self._server = StandInServer(type("Handler", (ApiHandler,), {"api": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.admin = self.user("admin")
        self._thread = threading.Thread(target=self._control, daemon=True)
        self._thread.start()
        self.admin.post("/api/v1/namespaces", {"metadata": {"name": "default"}})

    def user(self, name: str) -> Rest:
        token = secrets.token_hex(8)
        self._users[token] = name
        return Rest(self.url, token)

    def close(self) -> None:
        self._stops.set()
        self._thread.join(10)
        self._server.close()
        assert self.problem is None, self.problem

    # -- requests --

    def answer(self, method, path, query, body, token, content_type):
        """An object, a list, or bytes."""
        route = ROUTE.fullmatch(path)
        user = self._users.get(token)
        if user is None:
            raise HttpError(401, "Unauthorized", "Unauthorized")
        if route is None or route["resource"] not in KINDS:
            raise HttpError(404, "NotFound", "the server could not find the requested resource")
        resource, namespace, name, sub = route["resource"], route["namespace"] or "", route["name"], route["sub"]
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(method, "get" if name else "list")
        self._permit(user, verb, f"{resource}/{sub}" if sub else resource, namespace, route["group"] or "")
        if sub == "log":  # without the lock: the node must be able to speak meanwhile
            return self._log(namespace, name, query)
        with self.lock:
            if method == "POST" and sub == "eviction":
                return self._evict(namespace, name)
            if verb in ("create", "patch"):
                mode = query.get("fieldValidation", "Warn")
                self.field_validations.setdefault(user, []).append(mode)
                body = checked(resource, body, mode, verb == "patch")
            if method == "POST":
                return self._create(resource, namespace, body)
            if name is None:
                return self._list(resource, namespace, query)
            thing = self._get(resource, namespace, name)
            if method == "PATCH":
                return self._patch(resource, thing, body, sub, content_type)
            if method == "DELETE":
                options = {**(body or {}), **query}
                return self.delete(resource, thing, options)
            return thing

    def _permit(self, user, verb, resource, namespace, group):
        if user == "admin":
            return
        with self.lock:
            for binding in self._all("rolebindings", namespace):
                role = self.objects.get(("roles", namespace, binding["roleRef"]["name"]))
                for rule in role["rules"] if role and any(s["name"] == user for s in binding["subjects"]) else ():
                    if group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]:
                        return
        message = (
            f'{resource.partition("/")[0]} is forbidden: User "{user}" cannot {verb} resource "{resource}" '
            f'in API group "{group}" in the namespace "{namespace}"'
        )
        raise HttpError(403, "Forbidden", message)

    def _get(self, resource, namespace, name):
        if (resource, namespace, name) not in self.objects:
            raise HttpError(404, "NotFound", f'{resource} "{name}" not found')
        return self.objects[resource, namespace, name]

    def _all(self, resource, namespace=""):
        return [
            thing for (of, where, _), thing in list(self.objects.items()) if of == resource and namespace in ("", where)
        ]

    def _list(self, resource, namespace, query):
        things = self._all(resource, namespace)
        for term in filter(None, query.get("labelSelector", "").split(",")):
            key, _, value = term.partition("=")
            things = [each for each in things if each["metadata"].get("labels", {}).get(key) == value.lstrip("=")]
        for term in filter(None, query.get("fieldSelector", "").split(",")):
            path, _, value = term.partition("=")
            things = [each for each in things if _field(each, path) == value]
        return {"kind": f"{KINDS[resource]}List", "apiVersion": "v1", "metadata": {}, "items": things}

    def _create(self, resource, namespace, body):
        thing = copy.deepcopy(body)
        metadata = thing.setdefault("metadata", {})
        if resource not in ("namespaces", "nodes"):
            self._get("namespaces", "", namespace)
            metadata["namespace"] = namespace
        if not NAME.fullmatch(metadata.get("name", "")):
            raise invalid(f'{KINDS[resource]} "{metadata.get("name")}" is invalid: metadata.name: Invalid value')
        key = (resource, namespace, metadata["name"])
        if key in self.objects:
            raise HttpError(409, "AlreadyExists", f'{resource} "{metadata["name"]}" already exists')
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "resourceVersion": "1"}
        thing.setdefault("kind", KINDS[resource])
        if resource == "secrets":
            plain = thing.pop("stringData", {})
            encoded = {name: base64.b64encode(value.encode()).decode() for name, value in plain.items()}
            thing["data"] = {**thing.get("data", {}), **encoded}
        if resource == "jobs":
            check_job(thing)
            thing["status"] = {}
            self._books[metadata["uid"]] = JobBook()
            for volume in thing["spec"]["template"]["spec"].get("volumes", ()):
                if list(volume) == ["name"]:  # as a real server does
                    volume["emptyDir"] = {}
            labels = thing["spec"]["template"].setdefault("metadata", {}).setdefault("labels", {})
            labels |= {"batch.kubernetes.io/job-name": metadata["name"], "job-name": metadata["name"]}
        if resource == "pods":
            thing["status"] = {"phase": "Pending"}
        self.objects[key] = thing
        return thing

    def _patch(self, resource, thing, body, sub, content_type):
        patched = merged(thing, {"status": body.get("status")} if sub == "status" else body, resource, content_type)
        if resource == "jobs":
            check_job(patched)
            check_job_change(thing, patched)
        thing.clear()
        thing.update(patched)
        return thing

    def delete(self, resource, thing, options):
        metadata = thing["metadata"]
        uid = (options.get("preconditions") or {}).get("uid", metadata["uid"])
        if uid != metadata["uid"]:
            raise HttpError(409, "Conflict", "the UID in the precondition does not match")
        if resource == "jobs" and options.get("propagationPolicy") == "Foreground":
            finalizers = metadata.setdefault("finalizers", [])
            if "foregroundDeletion" not in finalizers:
                finalizers.append("foregroundDeletion")
        grace_s = 0
        if resource == "pods" and thing["spec"].get("nodeName") and not _has_ended(thing):
            grace_s = options.get("gracePeriodSeconds", thing["spec"].get("terminationGracePeriodSeconds", 30))
        if not metadata.get("deletionTimestamp") or int(grace_s) == 0:
            metadata["deletionTimestamp"] = metadata.get("deletionTimestamp") or now()
            metadata["deletionGracePeriodSeconds"] = int(grace_s)
        self._remove_if_free(resource, thing)
        return thing

    def _remove_if_free(self, resource, thing):
        """When its grace is over, or its node said that it is gone, and nobody holds it by a finalizer."""
        metadata = thing["metadata"]
        is_over = metadata.get("deletionTimestamp") and not metadata.get("deletionGracePeriodSeconds")
        if is_over and not metadata.get("finalizers"):
            self.objects.pop((resource, metadata.get("namespace", ""), metadata["name"]), None)

    def _evict(self, namespace, name):
        pod = self._get("pods", namespace, name)
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }
        pod["status"].setdefault("conditions", []).append(condition)
        self.delete("pods", pod, {})
        return {"kind": "Status", "status": "Success"}

    def _log(self, namespace, name, query):
        with self.lock:
            pod = self._get("pods", namespace, name)
            node = self.objects.get(("nodes", "", pod["spec"].get("nodeName", "")))
            container = _container_for_log(pod, query.get("container"))
            statuses = pod["status"].get("containerStatuses", ())
            state = next((each["state"] for each in statuses if each["name"] == container), {})
        if node is None or not ("running" in state or "terminated" in state):
            raise HttpError(400, "BadRequest", f'container "{container}" in pod "{name}" is waiting to start')
        port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
        of = urllib.parse.urlencode({key: value for key, value in query.items() if key == "tailLines"})
        url = f"http://127.0.0.1:{port}/containerLogs/{namespace}/{name}/{container}?{of}"
        with urllib.request.urlopen(url) as answer:
            return answer.read()

    # -- controllers --

    def _control(self):
        while not self._stops.wait(0.02):
            try:
                with self.lock:
                    for job in self._all("jobs"):
                        self._sync(job, self._books[job["metadata"]["uid"]])
                    self._collect_garbage()
                    self._look_for_nodes()
                    self._schedule()
            except Exception as error:
                self.problem = error
                return

    def _sync(self, job, book):
        pods = [pod for pod in self._all("pods", job["metadata"]["namespace"]) if _owner(pod) == job["metadata"]["uid"]]
        if job["metadata"].get("deletionTimestamp"):
            self._delete_pods(pods)
            if not pods and "foregroundDeletion" in job["metadata"].get("finalizers", ()):
                job["metadata"]["finalizers"].remove("foregroundDeletion")
                self._remove_if_free("jobs", job)
        elif book.ended_s is not None:
            self._delete_pods([pod for pod in pods if not _has_ended(pod)])
            for pod in pods:
                self._release(pod)
            if time.monotonic() > book.ended_s + job["spec"].get("ttlSecondsAfterFinished", 1e9):
                self.delete("jobs", job, {"propagationPolicy": "Foreground"})
        else:
            self._go_on(job, book, pods)

    def _go_on(self, job, book, pods):
        for pod in pods:
            if _has_ended(pod) and TRACKING in pod["metadata"].get("finalizers", ()):
                book.count(job, pod)
                self._release(pod)
        book.look_at_suspension(job)
        if job["spec"].get("suspend"):
            self._delete_pods([pod for pod in pods if not _has_ended(pod)])
            job["status"]["active"] = 0
            return
        active = {index_of(pod) for pod in pods if not _has_ended(pod)}
        num_workers = job["spec"]["completions"]
        self._delete_pods([pod for pod in pods if not _has_ended(pod) and index_of(pod) >= num_workers])
        book.completed = {index for index in book.completed if index < num_workers}
        job["status"] |= book.status(job, len(active))
        if book.ended_s is None:
            for index in range(num_workers):
                is_due = book.is_due(index) and index not in active and len(active) < job["spec"]["parallelism"]
                if is_due and self._make_pod(job, index):
                    active.add(index)

    def _delete_pods(self, pods):
        for pod in pods:
            self._release(pod)
            if not pod["metadata"].get("deletionTimestamp"):
                self.delete("pods", pod, {})

    def _release(self, pod):
        if TRACKING in pod["metadata"].get("finalizers", ()):
            pod["metadata"]["finalizers"].remove(TRACKING)
        self._remove_if_free("pods", pod)

    def _make_pod(self, job, index):
        namespace, template = job["metadata"]["namespace"], copy.deepcopy(job["spec"]["template"])
        name = f"{job['metadata']['name']}-{index}-{secrets.token_hex(3)}"
        metadata = template["metadata"] | {"name": name, "finalizers": [TRACKING]}
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
        }
        metadata["ownerReferences"] = [owner | {"controller": True, "blockOwnerDeletion": True}]
        if job["spec"].get("completionMode") == "Indexed":
            metadata["annotations"] = {INDEX: str(index)}
            metadata["labels"][INDEX] = str(index)
        num_pods = sum(not _has_ended(pod) for pod in self._all("pods", namespace))
        refusal = quota_refusal(name, num_pods, self._all("resourcequotas", namespace))
        refusal = refusal or security_refusal(name, template["spec"], self.objects["namespaces", "", namespace])
        if refusal:
            self._warn(job, "FailedCreate", f"Error creating: {refusal}")
            return False
        self._create("pods", namespace, {"apiVersion": "v1", "metadata": metadata, "spec": template["spec"]})
        return True

    def _warn(self, about, reason, message):
        metadata = about["metadata"]
        key = ("events", metadata["namespace"], f"{metadata['name']}.{reason.lower()}")
        involved = {"kind": about["kind"], "name": metadata["name"], "uid": metadata["uid"]}
        event = {"metadata": {"name": key[2], "namespace": key[1]}, "involvedObject": involved, "type": "Warning"}
        self.objects[key] = event | {"reason": reason, "message": message, "lastTimestamp": now()}

    def _collect_garbage(self):
        uids = {thing["metadata"].get("uid") for thing in self.objects.values()}
        for resource in ("jobs", "pods", "secrets"):
            for thing in self._all(resource):
                owners = thing["metadata"].get("ownerReferences")
                if owners and all(owner["uid"] not in uids for owner in owners):
                    if resource == "pods":
                        self._delete_pods([thing])
                    else:
                        self.delete(resource, thing, {})

    def _look_for_nodes(self):
        """Pods of a silent node are not ready: their Ready condition says so, and gives no reason."""
        for node in self._all("nodes"):
            is_silent = node["metadata"]["name"] in self.silent_nodes
            for condition in node.get("status", {}).get("conditions", ()) if is_silent else ():
                condition["status"] = "Unknown"
        for pod in self._all("pods"):
            if pod["spec"].get("nodeName") in self.silent_nodes:
                for condition in pod["status"].get("conditions", ()):
                    if condition["type"] == "Ready":
                        condition["status"] = "False"

    def _schedule(self):
        for pod in self._all("pods"):
            if pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp"):
                continue
            reasons = []
            for node in self._all("nodes"):
                reason = self._why_not(pod, node)
                if reason is None:
                    pod["spec"]["nodeName"] = node["metadata"]["name"]
                    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
                    break
                reasons.append(reason)
            else:
                message = f"0/{len(reasons)} nodes are available: 1 {', 1 '.join(reasons)}."
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
                pod["status"]["conditions"] = [condition]

    def _why_not(self, pod, node):
        selector, labels = pod["spec"].get("nodeSelector", {}), node["metadata"].get("labels", {})
        if any(labels.get(key) != value for key, value in selector.items()):
            return "node(s) didn't match Pod's node affinity/selector"
        if any(each["status"] != "True" for each in node["status"].get("conditions", ())):
            return "node(s) had untolerated taint {node.kubernetes.io/unreachable: }"
        here = [each for each in self._all("pods") if each["spec"].get("nodeName") == node["metadata"]["name"]]
        used = sum(_cpus(each) for each in here if not _has_ended(each))
        return None if used + _cpus(pod) <= float(node["status"]["allocatable"]["cpu"]) else "Insufficient cpu"


def _field(thing, path):
    for part in path.split("."):
        thing = (thing or {}).get(part)
    return thing


def _has_ended(pod):
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _owner(pod):
    return next((each["uid"] for each in pod["metadata"].get("ownerReferences", ())), None)


def _cpus(pod):
    total = 0.0
    for container in pod["spec"]["containers"]:
        amount = container.get("resources", {}).get("requests", {}).get("cpu", "0")
        total += float(amount[:-1]) / 1000 if amount.endswith("m") else float(amount)
    return total


def _container_for_log(pod, wanted):
    name, names = pod["metadata"]["name"], [each["name"] for each in pod["spec"]["containers"]]
    if wanted is None and len(names) > 1:
        words = f"a container name must be specified for pod {name}, choose one of: [{' '.join(names)}]"
        raise HttpError(400, "BadRequest", words)
    if wanted not in (None, *names):
        raise HttpError(400, "BadRequest", f"container {wanted} is not valid for pod {name}")
    return wanted or names[0]
