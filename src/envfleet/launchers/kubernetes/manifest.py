"""What Kubernetes is asked to create: Secret and Jobs as plain dicts, and as YAML. Pure. The reasons are in ADR 20."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envfleet.contract.exits import WorkerExit
from envfleet.contract.worker_environment import KEYS_VARIABLE, UNBUFFERED_VARIABLE, cpu_counts
from envfleet.launchers.kubernetes.deadline import first_deadline
from envfleet.launchers.launcher import WorkerJob

if TYPE_CHECKING:
    from envfleet.launchers.kubernetes.settings import Kubernetes

Manifest = dict[str, Any]

RUN_LABEL = "envfleet-run"
WORKER_LABEL = "envfleet-worker"  # of Jobs for a single worker, and of their pods
INDEX = "batch.kubernetes.io/job-completion-index"  # annotation of an Indexed Job's pods; since 1.28 also a label
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
CONTAINER = "worker"

# The Job controller waits 10, 20, 40 s before it replaces a worker's pod for the first, second and third time.
MOST_FAILURES_OF_A_WORKER = 3
LEAVE_S = 10  # seconds between SIGTERM and SIGKILL of a worker
KEEP_ENDED_S = 600  # Kubernetes deletes a Job this many seconds after it has ended

RESERVED_LABELS = frozenset((RUN_LABEL, WORKER_LABEL, "app.kubernetes.io/name", "app.kubernetes.io/component"))
RESERVED_VARIABLES = frozenset((INDEX_VARIABLE, KEYS_VARIABLE))
PLACEHOLDER = "(the keys of the run: EnvFleet makes them when it starts)"


def secret_manifest(settings: Kubernetes, job: WorkerJob, run: str, name: str) -> Manifest:
    """Return the Secret of a Job: the variables that only the workers may read."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(settings, run, name),
        "type": "Opaque",
        "stringData": dict(job.environment),
    }


def fleet_manifest(settings: Kubernetes, job: WorkerJob, run: str, name: str) -> Manifest:
    """Return the Indexed Job of all workers."""
    annotation = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    index = {"name": INDEX_VARIABLE, "valueFrom": annotation}
    spec = {
        "completionMode": "Indexed",
        **size_of(job.num_workers),
        "backoffLimitPerIndex": MOST_FAILURES_OF_A_WORKER,
    }
    pod = _pod(settings, job, name, f"$({INDEX_VARIABLE})", [index])
    return _job(settings, _metadata(settings, run, name), spec, pod)


def worker_manifest(settings: Kubernetes, job: WorkerJob, run: str, name: str, worker: int) -> Manifest:
    """Return the Job of a single worker, which replaces one that the Job of all workers has given up."""
    spec = {"completions": 1, "parallelism": 1, "backoffLimit": MOST_FAILURES_OF_A_WORKER}
    metadata = _metadata(settings, run, name, {WORKER_LABEL: str(worker)})
    return _job(settings, metadata, spec, _pod(settings, job, name, str(worker), []))


def size_of(num_workers: int) -> Manifest:
    """Return the part of a Job's spec that depends on the number of workers."""
    # Failures are limited for each worker (backoffLimitPerIndex); this limit for all is too high to be reached.
    limit = 20 + (MOST_FAILURES_OF_A_WORKER + 1) * num_workers
    return {"completions": num_workers, "parallelism": num_workers, "backoffLimit": limit}


def owner_reference(owner: Mapping[str, Any], api_version: str, kind: str) -> Manifest:
    """Return the ownerReference for an object that Kubernetes is to delete together with `owner`."""
    metadata = owner["metadata"]
    return {"apiVersion": api_version, "kind": kind, "name": metadata["name"], "uid": metadata["uid"]}


def mount_of(volume: Mapping[str, Any]) -> Manifest:
    """Return the keys of the user's volume that say where it is mounted; the others say what it is."""
    return {key: volume[key] for key in ("mountPath", "readOnly", "subPath") if key in volume}


def manifest_yaml(settings: Kubernetes, job: WorkerJob, name: str = "envfleet") -> str:
    """Return what is created for a run as YAML for a person to read, without the Secret's values."""
    secret = secret_manifest(settings, job, name, name)
    secret["stringData"] = dict.fromkeys(secret["stringData"], PLACEHOLDER)
    return "---\n".join(to_yaml(each) for each in (secret, fleet_manifest(settings, job, name, name)))


def to_yaml(value: Mapping[str, Any]) -> str:
    """Write plain dicts, lists and scalars as YAML. This small part of YAML needs no library."""
    return "".join(f"{line}\n" for line in _yaml_lines(value))


def _job(settings: Kubernetes, metadata: Manifest, spec: Manifest, pod: Manifest) -> Manifest:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            **spec,
            **first_deadline(settings.head_timeout_s),
            "podFailurePolicy": {"rules": _failure_rules()},
            "ttlSecondsAfterFinished": KEEP_ENDED_S,
            "template": {"metadata": {"labels": dict(metadata["labels"])}, "spec": pod},
        },
    }


def _pod(settings: Kubernetes, job: WorkerJob, secret: str, worker: str, first_env: list[Manifest]) -> Manifest:
    # In a container's arguments "$(NAME)" is replaced by a variable, and "$$" stands for "$".
    python, *arguments = (each.replace("$", "$$") for each in (settings.python, *job.arguments("")[:-1]))
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": [python],
        "args": [*arguments, worker],
        "env": [*first_env, *_variables(settings, job, secret)],
        "resources": _resources(settings),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    volumes, container["volumeMounts"] = _volumes(settings)
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": LEAVE_S,
        "securityContext": _security(settings),
        "containers": [container],
        "volumes": volumes,
    }
    if settings.service_account is not None:
        pod["serviceAccountName"] = settings.service_account
    if settings.node_selector:
        pod["nodeSelector"] = dict(settings.node_selector)
    if settings.tolerations:
        pod["tolerations"] = [dict(each) for each in settings.tolerations]
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": each} for each in settings.image_pull_secrets]
    return pod


def _security(settings: Kubernetes) -> Manifest:
    """Return the pod's security context. With a user other than root it satisfies PodSecurity's "restricted" level."""
    context: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
    if settings.run_as_user is not None:
        context["runAsUser"] = settings.run_as_user
    is_non_root = bool(settings.run_as_user) if settings.run_as_non_root is None else settings.run_as_non_root
    if is_non_root:
        context["runAsNonRoot"] = True
    return context


def _failure_rules() -> list[Manifest]:
    """Return the rules for ends of a pod that do not count as failures: disruptions, and workers told to leave."""
    codes = [int(WorkerExit.TOLD_TO_LEAVE), int(WorkerExit.OUT_OF_TIME)]
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes}},
    ]


def _metadata(settings: Kubernetes, run: str, name: str, labels: Mapping[str, str] | None = None) -> Manifest:
    return {
        "name": name,
        "namespace": settings.namespace,
        "labels": {
            **(settings.labels or {}),
            "app.kubernetes.io/name": "envfleet",
            "app.kubernetes.io/component": "worker",
            RUN_LABEL: run,
            **(labels or {}),
        },
    }


def _variables(settings: Kubernetes, job: WorkerJob, secret: str) -> list[Manifest]:
    plain = {**cpu_counts(max(1, math.ceil(settings.cpus_per_worker))), UNBUFFERED_VARIABLE: "1"}
    return [
        *({"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for key in job.environment),
        *({"name": key, "value": value} for key, value in (plain | dict(settings.env or {})).items()),
    ]


def _resources(settings: Kubernetes) -> Manifest:
    cpus = settings.cpus_per_worker
    amounts = {"cpu": str(int(cpus)) if cpus == int(cpus) else f"{max(1, round(cpus * 1000))}m"}
    if settings.memory_per_worker is not None:
        amounts["memory"] = str(settings.memory_per_worker)
    if settings.gpus_per_worker:
        amounts["nvidia.com/gpu"] = str(settings.gpus_per_worker)
    return {"requests": amounts, "limits": dict(amounts)}


def _volumes(settings: Kubernetes) -> tuple[list[Manifest], list[Manifest]]:
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []
    if all(volume["mountPath"] != "/dev/shm" for volume in settings.volumes):
        # A pool of processes keeps its arrays in /dev/shm, which has only 64 MB in a container by default.
        volumes.append({"name": "envfleet-shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "envfleet-shm", "mountPath": "/dev/shm"})
    for volume in settings.volumes:
        mount = mount_of(volume)
        volumes.append({key: value for key, value in volume.items() if key not in mount})
        mounts.append({"name": volume["name"], **mount})
    return volumes, mounts


_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.ASCII)
_NOT_TEXT = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n"))


def _yaml_lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        lines = []
        for key, each in value.items():
            inner = _yaml_lines(each)
            if isinstance(each, Mapping | list | tuple) and each:
                lines += [f"{_scalar(key)}:", *(f"  {line}" for line in inner)]
            else:
                lines.append(f"{_scalar(key)}: {inner[0]}")
        return lines
    if isinstance(value, list | tuple) and value:
        lines = []
        for each in value:
            first, *rest = _yaml_lines(each)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        return lines
    return [_scalar(value)]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    if isinstance(value, tuple):
        value = list(value)
    return json.dumps(value, ensure_ascii=False)
