"""launcher_of: a launcher from its name and its settings as text, so that a script can take both from its flags."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

from envfleet.contract.errors import UsageError
from envfleet.launchers.launcher import Launcher
from envfleet.launchers.text_settings import settings_from_text

# A launcher is imported when it is asked for.
_LAUNCHERS = {
    "local": "envfleet.launchers.local:Local",
    "slurm": "envfleet.launchers.slurm.settings:Slurm",
    "ray": "envfleet.launchers.ray.settings:Ray",
    "kubernetes": "envfleet.launchers.kubernetes.settings:Kubernetes",
    "ssh": "envfleet.launchers.ssh:SSH",
    "manual": "envfleet.launchers.manual:Manual",
}
LAUNCHER_NAMES = tuple(_LAUNCHERS)


def launcher_of(name: str, settings: Mapping[str, Any] | Iterable[str] = ()) -> Launcher:
    """Return a launcher by its name.

        launcher_of("slurm", {"partition": "cpu", "cpus_per_worker": 2})
        launcher_of("slurm", ["partition=cpu", "cpus_per_worker=2", "setup=module load cuda"])  # from a command line
        launcher_of("ssh", ["hosts=node1", "hosts=node2"])

    Args:
        name: "local", "slurm", "ray", "kubernetes", "ssh" or "manual".
        settings: The launcher's settings: a dict, or texts "name=value". Text is turned into the type of the setting.
            A setting that is a list takes one text for each item, a dict one text "name=key=value" for each key, and
            "none" switches a limit off. "-" in a name counts as "_".

    Returns:
        The launcher, such as `Slurm(partition="cpu", cpus_per_worker=2)`.

    Raises:
        UsageError: There is no such launcher or setting (the error lists those that there are), or a value is wrong.
    """
    if name not in _LAUNCHERS:
        raise UsageError(f"there is no launcher {name!r}; known: {', '.join(LAUNCHER_NAMES)}")
    module, _, kind = _LAUNCHERS[name].partition(":")
    given = settings if isinstance(settings, Mapping) else _by_name(settings)
    launcher = getattr(importlib.import_module(module), kind)
    return cast(Launcher, settings_from_text(launcher, {key.replace("-", "_"): given[key] for key in given}))


def _by_name(texts: Iterable[str]) -> dict[str, list[str]]:
    if isinstance(texts, str):
        raise UsageError(f"settings must be a dict, or a list of texts 'name=value'; got one text: {texts!r}")
    given: dict[str, list[str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"a setting of a launcher must be 'name=value'; got {text!r}")
        given.setdefault(name.replace("-", "_"), []).append(value)
    return given
