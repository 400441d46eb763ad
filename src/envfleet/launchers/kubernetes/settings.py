"""Kubernetes: workers are the pods of an Indexed Job."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from envfleet.contract.checks import positive_or_none, whole_number
from envfleet.contract.errors import UsageError
from envfleet.launchers.kubernetes import api as kubernetes_api
from envfleet.launchers.kubernetes.job import KubernetesJob
from envfleet.launchers.kubernetes.manifest import RESERVED_LABELS, RESERVED_VARIABLES, mount_of
from envfleet.launchers.launcher import WorkerJob
from envfleet.launchers.owned_job import OwnedJob

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
VARIABLE = re.compile(r"[-._A-Za-z][-._A-Za-z0-9]*")
MEMORY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?")


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Start workers as pods of an Indexed Job.

    Args:
        image: The container image, such as "example.org/envs:1". It must have EnvFleet and all modules that envs and
            policies import.
        namespace: The namespace of Job, Secret and pods.
        cpus_per_worker: The number of CPUs of each worker, such as 4 or 0.5.
        memory_per_worker: The memory of each worker: "2Gi", "500M", or a number of bytes. None: the namespace's
            default.
        gpus_per_worker: The number of GPUs of each worker (`nvidia.com/gpu`).
        service_account: The service account of the pods, for example one that may pull images. Pods get no token of
            it. None: the namespace's default account.
        node_selector: Labels that nodes must have, such as {"pool": "cpu"}.
        tolerations: Tolerations of the pods, as in a pod's spec: [{"key": "batch", "operator": "Exists"}].
        env: Further environment variables of the workers. No secrets: they stand in the Job.
        volumes: Volumes, each with a name, a mountPath, and a source as in a pod's spec: [{"name": "data",
            "mountPath": "/data", "persistentVolumeClaim": {"claimName": "data"}}]. "readOnly" and "subPath" are
            optional.
        context: A context of the kubeconfig. None: its current context; inside a pod without a kubeconfig, the pod's
            own service account.
        head_address: Where pods find the head: "host", "host:port" or "tcp://host:port", such as the name and port of
            a Service. None: this machine's address that is nearest to the API server.
        queue_timeout_s: The most seconds that workers may wait for a node. None: no limit.
        python: The Python interpreter in the image.
        image_pull_secrets: Names of Secrets with logins of registries.
        labels: Further labels of Job, Secret and pods.
        run_as_user: The numeric user id of the workers. A user other than 0 also sets runAsNonRoot, as the PodSecurity
            level "restricted" demands. None: the image's user.
        run_as_non_root: True: Kubernetes refuses to run the image as root. None: True if run_as_user is not root.
        head_timeout_s: Kubernetes ends the workers of a head that has been gone for this many seconds. None: never.
    """

    image: str
    _: KW_ONLY
    namespace: str = "default"
    cpus_per_worker: float = 1
    memory_per_worker: str | int | None = None
    gpus_per_worker: int = 0
    service_account: str | None = None
    node_selector: Mapping[str, str] | None = None
    tolerations: Sequence[Mapping[str, Any]] = ()
    env: Mapping[str, str] | None = None
    volumes: Sequence[Mapping[str, Any]] = ()
    context: str | None = None
    head_address: str | None = None
    queue_timeout_s: float | None = 300.0
    python: str = "python"
    image_pull_secrets: Sequence[str] = ()
    labels: Mapping[str, str] | None = None
    run_as_user: int | None = None
    run_as_non_root: bool | None = None
    head_timeout_s: float | None = 3600.0

    def __post_init__(self) -> None:
        """Raise UsageError if a setting is wrong."""
        self._check_names()
        self._check_resources()
        self._check_mappings()
        _check_volumes(self.volumes)

    @property
    def is_on_this_host(self) -> bool:
        """False: workers run on the nodes of a cluster."""
        return False

    def host_of_workers(self) -> str | None:
        """Return the host of the API server, which pods can reach too.

        Returns:
            The host; None if it is this machine (kind, minikube), because its loopback address means nothing to pods.

        Raises:
            UsageError: There is no Kubernetes configuration, or it has no such context.
            MissingExtra: The Kubernetes client is not installed.
        """
        host = kubernetes_api.host_of_server(self.context)
        return None if host in ("localhost", "::1") or host.startswith("127.") else host

    def launch(self, job: WorkerJob) -> OwnedJob:
        """Create the Job of all workers, and the Secret with the run's keys.

        Args:
            job: What to start.

        Returns:
            The workers; most of them are PENDING.

        Raises:
            UsageError: There is no Kubernetes configuration, or the API server refuses a field of the Job.
            ClusterError: The API server refuses, or does not answer; nothing was left behind if it could be deleted.
            MissingExtra: The Kubernetes client is not installed.
        """
        return OwnedJob(KubernetesJob(self, job))

    def _check_names(self) -> None:
        for name in ("image", "python"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or any(each.isspace() for each in value):
                raise UsageError(f"{name} must be a name without spaces; got {value!r}")
        if not (isinstance(self.namespace, str) and DNS_LABEL.fullmatch(self.namespace)):
            raise UsageError(f"namespace must be 1 to 63 lower-case letters, digits and '-'; got {self.namespace!r}")
        account = self.service_account
        if account is not None and not (isinstance(account, str) and DNS_SUBDOMAIN.fullmatch(account)):
            raise UsageError(
                f"service_account must be 1 to 253 lower-case letters, digits, '-' and '.'; got {account!r}"
            )
        if isinstance(self.image_pull_secrets, str):
            raise UsageError(f"image_pull_secrets must be a list of names; got {self.image_pull_secrets!r}")

    def _check_resources(self) -> None:
        if not (isinstance(self.cpus_per_worker, int | float) and 0.001 <= self.cpus_per_worker <= 1e5):
            raise UsageError(f"cpus_per_worker must be a positive number; got {self.cpus_per_worker!r}")
        if self.memory_per_worker is not None and not MEMORY.fullmatch(str(self.memory_per_worker)):
            raise UsageError(
                f"memory_per_worker must be a number of bytes, or text such as '2Gi' or '500M'; "
                f"got {self.memory_per_worker!r}"
            )
        object.__setattr__(self, "gpus_per_worker", whole_number("gpus_per_worker", self.gpus_per_worker, at_least=0))
        positive_or_none("queue_timeout_s", self.queue_timeout_s)
        if self.head_timeout_s is not None and not 1 <= self.head_timeout_s <= 1e9:
            raise UsageError(f"head_timeout_s must be at least 1, or None for no limit; got {self.head_timeout_s!r}")
        self._check_user()

    def _check_user(self) -> None:
        user = self.run_as_user
        if user is not None and not (isinstance(user, int) and not isinstance(user, bool) and 0 <= user < 2**31):
            raise UsageError(f"run_as_user must be a numeric user id; got {user!r}")
        if self.run_as_non_root not in (None, True, False):
            raise UsageError(f"run_as_non_root must be True, False or None; got {self.run_as_non_root!r}")
        if user == 0 and self.run_as_non_root:
            raise UsageError("run_as_user=0 is root, which run_as_non_root=True forbids: leave one of them out")

    def _check_mappings(self) -> None:
        for name, value in (self.env or {}).items():
            if not VARIABLE.fullmatch(name) or name in RESERVED_VARIABLES or not isinstance(value, str):
                raise UsageError(f"env must map names of variables to text; got {name!r}: {value!r}")
        for setting in ("labels", "node_selector"):
            for name, value in (getattr(self, setting) or {}).items():
                is_text = isinstance(name, str) and isinstance(value, str)
                if not (is_text and LABEL_KEY.fullmatch(name) and LABEL_VALUE.fullmatch(value)):
                    raise UsageError(
                        f"{setting} must map valid label keys to valid label values; got {name!r}: {value!r}"
                    )
        taken = RESERVED_LABELS & set(self.labels or {})
        if taken:
            raise UsageError(f"labels must not have {', '.join(sorted(taken))}: EnvFleet finds its pods by them")
        for toleration in self.tolerations:
            if not isinstance(toleration, Mapping):
                raise UsageError(
                    f"tolerations must be mappings as in a pod's spec, such as {{'key': ...}}; got {toleration!r}"
                )
            _check_plain("tolerations", toleration)


def _check_volumes(volumes: Sequence[Mapping[str, Any]]) -> None:
    example = "{'name': 'data', 'mountPath': '/data', 'persistentVolumeClaim': {'claimName': 'data'}}"
    names = set()
    for volume in volumes:
        if not isinstance(volume, Mapping):
            raise UsageError(f"volumes must be mappings such as {example}; got {volume!r}")
        name, sources = volume.get("name"), [key for key in volume if key not in ("name", *mount_of(volume))]
        if not (isinstance(name, str) and DNS_LABEL.fullmatch(name) and "mountPath" in volume and len(sources) == 1):
            raise UsageError(
                f"a volume must have a name, a mountPath and one source, such as {example}; got {volume!r}"
            )
        _check_plain("volumes", volume)
        if name in names:
            raise UsageError(f"two volumes are called {name!r}")
        names.add(name)


def _check_plain(setting: str, value: Mapping[str, Any]) -> None:
    """Raise UsageError if a value cannot be written as JSON, which is what the API server is sent."""
    try:
        json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{setting} must be of plain dicts, lists, text and numbers: {error}; got {value!r}"
        ) from error
