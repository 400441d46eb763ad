"""KubernetesApi: the calls that EnvFleet makes to the API server. Each has a deadline; refusals become errors."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from envfleet.contract.errors import ClusterError, MissingExtra, UsageError

logger = logging.getLogger("envfleet.launchers")

CONNECT_S, ANSWER_S = 3.0, 5.0
LEAST_S = 1.0  # the least that a call has, also after the deadline of all calls
POD_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
STRICT = "Strict"  # the server refuses unknown and duplicate fields; by default it drops them
LIST_TYPE = re.compile(r"[Ll]ist\[(.+)\]")  # how the client writes the type of a list
ROLE_HINT = "docs/kubernetes.md has the Role that EnvFleet needs (deploy/rbac.yaml)"

Object = dict[str, Any]


class Unreachable(ClusterError):
    """The API server does not answer now; it may later."""


class NotThere(ClusterError):
    """The API server has no such object."""


class Forbidden(ClusterError):
    """The user of the API has no right to do this."""


class KubernetesApi:
    """One namespace of one cluster. Objects are plain dicts, as the API server writes them.

    All calls raise UsageError, ClusterError, or one of its kinds above.

    Args:
        namespace: The namespace of all objects.
        context: A context of the kubeconfig. None: see `Kubernetes`.

    Raises:
        UsageError: There is no such configuration.
        MissingExtra: The Kubernetes client is not installed.
    """

    def __init__(self, namespace: str, context: str | None) -> None:
        configuration = _configuration(context)
        configuration.retries = False  # the client's own retries would multiply every deadline
        client = client_module("client")
        self._namespace = namespace
        self._is_own_cluster = _is_own_cluster(context)
        self._server = configuration.host
        self._client = client.ApiClient(configuration)
        self._batch = client.BatchV1Api(self._client)
        self._core = client.CoreV1Api(self._client)
        self._deadline_s = float("inf")

    def answer_until(self, deadline_s: float) -> None:
        """Give all further calls a common deadline, by the monotonic clock."""
        self._deadline_s = deadline_s

    def create_secret(self, manifest: Object) -> Object:
        """Create a Secret in the namespace."""
        return self._ask(
            self._core.create_namespaced_secret, "create", "secrets", body=manifest, field_validation=STRICT
        )

    def own_secret(self, name: str, owner: Object) -> Object:
        """Make Kubernetes delete a Secret together with its owner."""
        body = {"metadata": {"ownerReferences": [owner]}}
        call = self._core.patch_namespaced_secret
        return self._ask(call, "patch", "secrets", name=name, body=body, field_validation=STRICT)

    def delete_secret(self, name: str) -> None:
        """Delete a Secret, if it exists."""
        with contextlib.suppress(NotThere):
            self._ask(self._core.delete_namespaced_secret, "delete", "secrets", name=name)

    def create_job(self, manifest: Object) -> Object:
        """Create a Job in the namespace."""
        return self._ask(self._batch.create_namespaced_job, "create", "jobs", body=manifest, field_validation=STRICT)

    def patch_job(self, name: str, spec: Mapping[str, Any]) -> Object:
        """Change fields of a Job's spec."""
        call, body = self._batch.patch_namespaced_job, {"spec": dict(spec)}
        return self._ask(call, "patch", "jobs", name=name, body=body, field_validation=STRICT)

    def delete_job(self, name: str) -> None:
        """Delete a Job, if it exists, after its pods."""
        with contextlib.suppress(NotThere):
            self._ask(self._batch.delete_namespaced_job, "delete", "jobs", name=name, propagation_policy="Foreground")

    def delete_pod(self, name: str) -> None:
        """Delete a pod, if it exists; its worker is told to leave first."""
        with contextlib.suppress(NotThere):
            self._ask(self._core.delete_namespaced_pod, "delete", "pods", name=name)

    def jobs(self, selector: str) -> list[Object]:
        """Return all Jobs with these labels."""
        return _items(self._ask(self._batch.list_namespaced_job, "list", "jobs", label_selector=selector))

    def pods(self, selector: str) -> list[Object]:
        """Return all pods with these labels."""
        # "0": from the API server's cache, without a read of its database.
        call = self._core.list_namespaced_pod
        return _items(self._ask(call, "list", "pods", label_selector=selector, resource_version="0"))

    def warnings(self, uid: str) -> list[Object]:
        """Return the warnings (events) about an object."""
        selector = f"type=Warning,involvedObject.uid={uid}"
        return _items(self._ask(self._core.list_namespaced_event, "list", "events", field_selector=selector))

    def own_pod(self) -> Object | None:
        """Return the pod of this process; None if it is in no pod of this cluster and namespace."""
        if not self._is_own_cluster or _own_namespace() != self._namespace:
            return None  # Kubernetes takes an owner in another namespace for deleted, and would delete what it owns
        selector = f"metadata.name={os.environ.get('HOSTNAME') or socket.gethostname()}"
        call = self._core.list_namespaced_pod
        # Not found if the pod's hostname is not its name, as with hostNetwork.
        return next(iter(_items(self._ask(call, "list", "pods", field_selector=selector))), None)

    def pod_log(self, name: str, container: str, max_bytes: int) -> str:
        """Return the end of what a container of a pod has printed, at most `max_bytes`."""
        tail = max(1, max_bytes // 20)  # the API limits the end of a log in lines only
        call = self._core.read_namespaced_pod_log
        text = self._raw(call, "get", "pods/log", name=name, container=container, tail_lines=tail)
        return text[-max_bytes:].decode(errors="replace")

    def close(self) -> None:
        """Close the connections."""
        with contextlib.suppress(Exception):  # the client is not used any more
            self._client.rest_client.pool_manager.clear()

    def _ask(self, call: Callable[..., Any], verb: str, resource: str, **arguments: Any) -> Object:
        answer = self._raw(call, verb, resource, **arguments)
        try:
            value = json.loads(answer)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Unreachable(f"what answers at {self._server} is no Kubernetes API server: {answer[:200]!r}")
        return value

    def _raw(self, call: Callable[..., Any], verb: str, resource: str, **arguments: Any) -> bytes:
        what = f"{verb} {resource} in namespace {self._namespace}"
        left_s = max(LEAST_S, self._deadline_s - time.monotonic())
        timeout = (min(CONNECT_S, left_s), min(ANSWER_S, left_s))
        try:
            answer = call(namespace=self._namespace, _preload_content=False, _request_timeout=timeout, **arguments)
            return bytes(answer.data)
        except client_module("client").ApiException as error:
            if not error.status:  # an error of TLS
                raise Unreachable(f"the API server at {self._server} cannot be trusted: {error.reason}") from error
            raise refusal(error.status, _words(error), what, verb, resource, self._namespace) from error
        except (_http_error(), OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise Unreachable(
                f"the Kubernetes API server at {self._server} does not answer ({what}): {reason}"
            ) from error
        except ValueError as error:  # the client validates what it sends, by the Kubernetes version it was made for
            raise UsageError(f"the Kubernetes client refuses it ({what}): {_client_words(error)}") from error


def refusal(status: int, words: str, what: str, verb: str, resource: str, namespace: str) -> Exception:
    """Return the error for a refusal of the API server. Pure.

    Args:
        status: The HTTP status.
        words: What the API server said.
        what: The call, for the message.
        verb: The verb of the call: "create".
        resource: The resource of the call: "jobs".
        namespace: The namespace of the call.
    """
    if status == 401:
        return ClusterError(f"Kubernetes does not know you ({what}): {words}. Log in again, or choose another context=")
    if status == 403 and "exceeded quota" in words:
        return ClusterError(f"the quota of namespace {namespace} is used up ({what}): {words}")
    if status == 403:
        found = re.search(r'User "([^"]+)"', words)
        user = found.group(1) if found else "this user"
        return Forbidden(
            f"forbidden: {user} may not {verb} {resource} in namespace {namespace}: {words}. "
            f"Give it a Role with verb {verb!r} on resource {resource!r}; {ROLE_HINT}"
        )
    if status == 404 and re.search(r'namespaces? "', words):
        return ClusterError(
            f"there is no namespace {namespace!r}: {words}. Create it with: kubectl create namespace {namespace}"
        )
    if status == 404:
        return NotThere(f"{what}: {words}")
    if status in (400, 422):
        return UsageError(f"Kubernetes refuses it ({what}): {words}")
    if status in (429, 500, 502, 503, 504):
        return Unreachable(f"the Kubernetes API server cannot answer now ({what}): {status}: {words}")
    return ClusterError(f"Kubernetes refuses it ({what}): {status}: {words}")


def host_of_server(context: str | None) -> str:
    """Return the host of the API server."""
    return urllib.parse.urlsplit(_configuration(context).host).hostname or ""


def _configuration(context: str | None) -> Any:
    config, configuration = client_module("config"), client_module("client").Configuration()
    try:
        if _is_own_cluster(context):
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(
                config_file=os.environ.get("KUBECONFIG") or None, context=context, client_configuration=configuration
            )
    except config.ConfigException as error:
        raise UsageError(
            f"no Kubernetes configuration (KUBECONFIG, ~/.kube/config or a pod's account) with "
            f"{'a current context' if context is None else f'context {context!r}'}: {error}"
        ) from error
    return configuration


def _is_own_cluster(context: str | None) -> bool:
    """Return whether this process is in a pod and uses the pod's service account."""
    is_in_a_pod = "KUBERNETES_SERVICE_HOST" in os.environ and POD_TOKEN.exists()
    return context is None and not os.environ.get("KUBECONFIG") and is_in_a_pod


def _own_namespace() -> str | None:
    try:
        return POD_TOKEN.with_name("namespace").read_text().strip()
    except OSError:
        return None


def client_module(name: str) -> Any:
    """Import a module of the official Kubernetes client.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        return importlib.import_module(f"kubernetes.{name}")
    except ImportError as error:
        raise MissingExtra('launcher=Kubernetes(...) needs: pip install "envfleet[kubernetes]"') from error


def check_fields(manifest: Mapping[str, Any]) -> None:
    """Compare a manifest with the types that the installed Kubernetes client knows.

    Raises:
        UsageError: The manifest has fields that its kind does not have.
        MissingExtra: The client is not installed.
    """
    unknown = list(_unknown_fields(manifest, f"V1{manifest['kind']}", "", client_module("client")))
    if unknown:
        version = importlib.import_module("kubernetes").__version__
        fields = ", ".join(f'unknown field "{path}"' for path in unknown)
        raise UsageError(
            f"{manifest['kind']} {manifest['metadata']['name']} has {fields} (as the Kubernetes client {version} knows "
            f"it): check the spelling, or install a newer client if your cluster has such a field"
        )


def _unknown_fields(value: Any, type_name: str, path: str, models: Any) -> Iterator[str]:
    item = LIST_TYPE.fullmatch(type_name)
    if item is not None and isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _unknown_fields(each, item.group(1), f"{path}[{number}]", models)
    model = getattr(models, type_name, None)
    if model is None or not isinstance(value, Mapping):
        return  # a scalar, or a mapping with free keys, such as labels
    types = {field: model.openapi_types[name] for name, field in model.attribute_map.items()}
    for field, each in value.items():
        inner = f"{path}.{field}".lstrip(".")
        if field in types:
            yield from _unknown_fields(each, types[field], inner, models)
        else:
            yield inner


def _http_error() -> type[Exception]:
    error: type[Exception] = importlib.import_module("urllib3.exceptions").HTTPError
    return error


def _words(error: Any) -> str:
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    with contextlib.suppress(ValueError, AttributeError):
        return str(json.loads(body).get("message") or error.reason)
    return body[:500] or str(error.reason)


def _client_words(error: ValueError) -> str:
    """Return what is wrong, and where: `spec.template.spec.volumes.0.hostPth: Extra inputs are not permitted`."""
    with contextlib.suppress(AttributeError, TypeError, KeyError):
        faults: list[dict[str, Any]] = error.errors()  # type: ignore[attr-defined]  # a ValidationError of pydantic
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in faults)
    return str(error)


def _items(answer: Object) -> list[Object]:
    return list(answer.get("items") or [])
