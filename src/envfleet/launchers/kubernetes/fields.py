"""Fields of a manifest that Kubernetes does not know, found without an API server: misspelt ones, mostly."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from envfleet.contract.errors import UsageError
from envfleet.launchers.kubernetes.api import client_module

LIST = re.compile(r"[Ll]ist\[(.+)\]")


def check_fields(manifest: Mapping[str, Any]) -> None:
    """Compare a manifest with the types that the installed Kubernetes client knows.

    Raises:
        UsageError: The manifest has fields that its kind does not have.
        MissingExtra: The client is not installed.
    """
    unknown = list(_unknown(manifest, f"V1{manifest['kind']}", "", client_module("client")))
    if unknown:
        version = importlib.import_module("kubernetes").__version__
        fields = ", ".join(f'unknown field "{path}"' for path in unknown)
        raise UsageError(
            f"{manifest['kind']} {manifest['metadata']['name']} has {fields} (as the Kubernetes client {version} knows "
            f"it): check the spelling, or install a newer client if your cluster has such a field"
        )


def _unknown(value: Any, type_name: str, path: str, models: Any) -> Iterator[str]:
    item = LIST.fullmatch(type_name)
    if item is not None and isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _unknown(each, item.group(1), f"{path}[{number}]", models)
    model = getattr(models, type_name, None)
    if model is None or not isinstance(value, Mapping):
        return  # a value, or a mapping whose keys are the user's own
    types = {field: model.openapi_types[name] for name, field in model.attribute_map.items()}
    for field, each in value.items():
        inner = f"{path}.{field}".lstrip(".")
        if field in types:
            yield from _unknown(each, types[field], inner, models)
        else:
            yield inner
