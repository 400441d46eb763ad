"""Kubernetes: workers are the pods of an Indexed Job. The settings, which check themselves."""

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
    """Start workers as pods. The image must have EnvFleet, and all that envs and policies import."""

    image: str
    _: KW_ONLY
    namespace: str = "default"
    cpus_per_worker: float = 1
    memory_per_worker: str | int | None = None  # "2Gi", "500M", or a number of bytes; None: no limit of ours
    gpus_per_worker: int = 0
    service_account: str | None = None  # of the workers, for example to pull images; they get no token of it
    node_selector: Mapping[str, str] | None = None
    tolerations: Sequence[Mapping[str, Any]] = ()  # as in a pod
    env: Mapping[str, str] | None = None
    volumes: Sequence[Mapping[str, Any]] = ()  # {"name": ..., "mountPath": ..., and a source as in a pod}
    context: str | None = None  # of the kubeconfig; None: the current one, or the pod's own account inside a cluster
    head_address: str | None = None  # where pods find the head: a Service's name and port, or this machine's address
    queue_timeout_s: float | None = 300.0  # how long workers may wait for a node
    python: str = "python"  # the interpreter in the image
    image_pull_secrets: Sequence[str] = ()
    labels: Mapping[str, str] | None = None  # for Job, Secret and pods
    run_as_user: int | None = None  # numeric user of the workers; one other than 0 also sets runAsNonRoot
    run_as_non_root: bool | None = None  # True: an image whose user is root is refused, as PodSecurity wants it
    head_timeout_s: float | None = 3600.0  # Kubernetes ends the Jobs of a head that has been gone for this long

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        self._check_names()
        self._check_resources()
        self._check_mappings()
        _check_volumes(self.volumes)

    @property
    def is_on_this_host(self) -> bool:
        """See Launcher."""
        return False

    def host_of_workers(self) -> str | None:
        """See Launcher. The API server is in the pods' network; one on this machine (kind, minikube) says nothing."""
        host = kubernetes_api.host_of_server(self.context)
        return None if host in ("localhost", "::1") or host.startswith("127.") else host

    def launch(self, job: WorkerJob) -> OwnedJob:
        """See Launcher."""
        return OwnedJob(KubernetesJob(self, job))

    def _check_names(self) -> None:
        for name in ("image", "python"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or any(each.isspace() for each in value):
                raise UsageError(f"{name} must be a name without spaces; got {value!r}")
        if not (isinstance(self.namespace, str) and DNS_LABEL.fullmatch(self.namespace)):
            raise UsageError(
                f"namespace must be of lower-case letters, digits and '-', at most 63; got {self.namespace!r}"
            )
        account = self.service_account
        if account is not None and not (isinstance(account, str) and DNS_SUBDOMAIN.fullmatch(account)):
            raise UsageError(
                f"service_account must be of lower-case letters, digits, '-' and '.', at most 253; got {account!r}"
            )
        if isinstance(self.image_pull_secrets, str):
            raise UsageError(f"image_pull_secrets must be a list of names; got {self.image_pull_secrets!r}")

    def _check_resources(self) -> None:
        if not (isinstance(self.cpus_per_worker, int | float) and 0.001 <= self.cpus_per_worker <= 1e5):
            raise UsageError(f"cpus_per_worker must be a positive number; got {self.cpus_per_worker!r}")
        if self.memory_per_worker is not None and not MEMORY.fullmatch(str(self.memory_per_worker)):
            raise UsageError(
                f"memory_per_worker must be a number of bytes, or text as '2Gi' or '500M'; "
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
            raise UsageError(f"run_as_user must be the number of a user; got {user!r}")
        if self.run_as_non_root not in (None, True, False):
            raise UsageError(f"run_as_non_root must be True, False or None; got {self.run_as_non_root!r}")
        if user == 0 and self.run_as_non_root:
            raise UsageError("run_as_user=0 is root, and run_as_non_root=True forbids it: leave one of them out")

    def _check_mappings(self) -> None:
        for name, value in (self.env or {}).items():
            if not VARIABLE.fullmatch(name) or name in RESERVED_VARIABLES or not isinstance(value, str):
                raise UsageError(f"env must map names of variables to text, {name!r} does not: {value!r}")
        for setting in ("labels", "node_selector"):
            for name, value in (getattr(self, setting) or {}).items():
                is_text = isinstance(name, str) and isinstance(value, str)
                if not (is_text and LABEL_KEY.fullmatch(name) and LABEL_VALUE.fullmatch(value)):
                    raise UsageError(f"{setting} has {name!r}: {value!r}, which is no label that Kubernetes takes")
        taken = RESERVED_LABELS & set(self.labels or {})
        if taken:
            raise UsageError(f"labels must not have {', '.join(sorted(taken))}: EnvFleet finds its pods by them")
        for toleration in self.tolerations:
            if not isinstance(toleration, Mapping):
                raise UsageError(
                    f"tolerations must be mappings as in a pod, such as {{'key': ...}}; got {toleration!r}"
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
    """Refuse what has no form in JSON: the API server could not be asked for it."""
    try:
        json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{setting} must be of plain dicts, lists, text and numbers: {error}; got {value!r}"
        ) from error
