"""Rest: an API server's objects by path, as plain dicts. For tests and stand-ins; the code under test has its own."""

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path


class Refused(Exception):
    def __init__(self, status, message):
        super().__init__(f"{status}: {message}")
        self.status = status


class Rest:
    """One user of an API server."""

    def __init__(self, server: str, token: str, certificate_authority: Path | None = None) -> None:
        self.server, self.token, self.certificate_authority = server, token, certificate_authority
        self._context = (
            None if certificate_authority is None else ssl.create_default_context(cafile=certificate_authority)
        )

    def get(self, path):
        return self._call("GET", path)

    def post(self, path, body):
        return self._call("POST", path, body)

    def merge(self, path, body):
        return self._call("PATCH", path, body, "application/merge-patch+json")

    def merge_lists(self, path, body):
        """A strategic merge: lists whose items have a key, such as conditions, are merged by it."""
        return self._call("PATCH", path, body, "application/strategic-merge-patch+json")

    def delete(self, path, body=None):
        return self._call("DELETE", path, body)

    def items(self, path):
        return self.get(path)["items"]

    def text(self, path):
        return self._raw("GET", path)

    def kubeconfig(self, folder: Path, user: str, namespace: str) -> Path:
        """A file for the official client, for this user."""
        cluster = {"server": self.server}
        if self.certificate_authority is not None:
            cluster["certificate-authority"] = str(self.certificate_authority)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
        }
        path = folder / f"kubeconfig-{user}"
        path.write_text(json.dumps(config))  # JSON is YAML
        return path

    def _call(self, method, path, body=None, content_type="application/json"):
        return json.loads(self._raw(method, path, body, content_type))

    def _raw(self, method, path, body=None, content_type="application/json"):
        return self.send(method, path, None if body is None else json.dumps(body).encode(), content_type)

    def send(self, method, path, content, content_type="application/json"):
        request = urllib.request.Request(
            self.server + path,
            method=method,
            data=content,
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": content_type, "Accept": "*/*"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10, context=self._context) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, error.read().decode(errors="replace")) from None
