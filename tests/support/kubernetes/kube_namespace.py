"""Kube: what a test of Kubernetes has: a namespace, a node, and a user for the head."""

import secrets
import time
from pathlib import Path

import yaml

from tests.support.kubernetes.api_stand_in import ApiStandIn
from tests.support.kubernetes.node_stand_in import NodeStandIn
from tests.support.kubernetes.rest import Refused, Rest
from tests.support.scripts import ROOT

DEPLOY = ROOT / "deploy"


class Kube:
    """A namespace with a node, for one test. The head's user may do what deploy/rbac.yaml says, and nothing else."""

    def __init__(self, admin: Rest, head: Rest, folder: Path, api: ApiStandIn | None) -> None:
        self.admin, self.api = admin, api
        self.namespace = f"test-{secrets.token_hex(4)}"
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        self.admin.post("/api/v1/namespaces", namespace)
        self.kubeconfig = head.kubeconfig(folder, "head", self.namespace)
        self.node: NodeStandIn | None = None

    def objects(self, resource: str) -> list[dict]:
        group = {"jobs": "apis/batch", "rolebindings": "apis/rbac.authorization.k8s.io"}.get(resource, "api")
        return self.admin.items(f"/{group}/v1/namespaces/{self.namespace}/{resource}")

    def names(self, resource: str) -> list[str]:
        return [thing["metadata"]["name"] for thing in self.objects(resource)]

    def path(self, resource: str, name: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/{resource}/{name}"

    def allow(self, rules: list[dict]) -> None:
        """What the head's user may do, instead of what it might."""
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"
        for kind in ("rolebindings", "roles"):
            if self.kind_exists(f"{path}/{kind}/envfleet-head"):
                self.admin.delete(f"{path}/{kind}/envfleet-head")
        of = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "envfleet-head"}}
        self.admin.post(f"{path}/roles", of | {"kind": "Role", "rules": rules})
        group = "rbac.authorization.k8s.io"
        role = {"apiGroup": group, "kind": "Role", "name": "envfleet-head"}
        user = {"apiGroup": group, "kind": "User", "name": "head"}
        self.admin.post(f"{path}/rolebindings", of | {"kind": "RoleBinding", "roleRef": role, "subjects": [user]})
        time.sleep(0.0 if self.api else 1.0)  # a real server hears of it from itself, a little later

    def vanish(self, node: NodeStandIn) -> None:
        """A node does not report any more, and its pods cannot be ended; real servers notice by themselves."""
        node.is_away = True
        if self.api is not None:
            self.api.silent_nodes.add(node.name)

    def come_back(self, node: NodeStandIn) -> None:
        if self.api is not None:
            self.api.silent_nodes.discard(node.name)
        node.is_away = False

    def kind_exists(self, path: str) -> bool:
        try:
            self.admin.get(path)
        except Refused:
            return False
        return True

    def leftovers(self) -> list[str]:
        """Everything of EnvFleet that is still there."""
        return [
            f"{resource}/{thing['metadata']['name']}"
            for resource in ("jobs", "pods", "secrets")
            for thing in self.objects(resource)
            if "envfleet-run" in thing["metadata"].get("labels", {})
        ]


def rules_of_deploy() -> list[dict]:
    documents = yaml.safe_load_all((DEPLOY / "rbac.yaml").read_text())
    return next(each["rules"] for each in documents if each["kind"] == "Role")
