"""What ApiStandIn knows of fields: unknown and duplicate ones, and which lists a strategic merge patch merges.

It reads the schemas of Kubernetes itself, of the version below, from kubernetes_validate.
"""

import copy
import functools
import importlib.resources
import json

from tests.support.kubernetes.job_stand_in import HttpError

VERSION = "v1.34.0-local"
TYPES = {"jobs": "io.k8s.api.batch.v1.Job", "pods": "io.k8s.api.core.v1.Pod", "secrets": "io.k8s.api.core.v1.Secret"}


class _Pairs(dict):
    """A JSON object that remembers which of its keys came twice."""

    def __init__(self, pairs):
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.doubles = [name for name in self if names.count(name) > 1]


def parsed(content):
    return json.loads(content, object_pairs_hook=_Pairs)


def checked(resource, body, mode, is_patch=False):
    """Without fields that the kind of object does not have; mode Strict refuses them, and duplicates."""
    faults = []
    clean = _checked(body, _schema(resource), "", faults)
    if faults and mode == "Strict":
        words = f"strict decoding error: {', '.join(faults)}"
        if is_patch:
            raise HttpError(422, "Invalid", f' "" is invalid: patch: Invalid value: {json.dumps(body)}: {words}')
        kind = TYPES.get(resource, "").rpartition(".")[2]
        raise HttpError(400, "BadRequest", f'{kind} in version "v1" cannot be handled as a {kind}: {words}')
    return clean


def merged(old, patch, resource, content_type):
    """A merge patch replaces lists; a strategic one merges those whose items have a key."""
    is_strategic = "strategic" in content_type
    return _merged(old, patch, _schema(resource) if is_strategic else {})


@functools.cache
def _definitions():
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema" / VERSION
    return json.loads((folder / "_definitions.json").read_text())["$defs"]


def _schema(resource):
    return _definitions()[TYPES[resource]] if resource in TYPES else {}


def _resolved(schema):
    return _definitions()[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _checked(value, schema, path, faults):
    schema = _resolved(schema)
    if isinstance(value, list):
        return [
            _checked(each, schema.get("items", {}), f"{path}[{number}]", faults) for number, each in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    faults += [f'duplicate field "{f"{path}.{name}".lstrip(".")}"' for name in getattr(value, "doubles", ())]
    clean = {}
    for name, each in value.items():
        inner = f"{path}.{name}".lstrip(".")
        if name not in schema.get("properties", {name: {}}):
            faults.append(f'unknown field "{inner}"')
        else:
            clean[name] = _checked(each, schema.get("properties", {}).get(name, {}), inner, faults)
    return clean


def _merged(old, patch, schema):
    schema = _resolved(schema)
    key = schema.get("x-kubernetes-patch-merge-key")
    if key and isinstance(old, list) and isinstance(patch, list):
        new = {each[key]: each for each in old}
        for each in patch:
            new[each[key]] = _merged(new.get(each[key]), each, schema.get("items", {}))
        return list(new.values())
    if not isinstance(old, dict) or not isinstance(patch, dict):
        return copy.deepcopy(patch)
    types = schema.get("properties", {})
    new = {name: value for name, value in old.items() if patch.get(name, "") is not None}
    return new | {
        name: _merged(old.get(name), value, types.get(name, {})) for name, value in patch.items() if value is not None
    }
