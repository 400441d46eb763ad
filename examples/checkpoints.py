"""What the examples share of saving and going on: every so many seconds, at the end, and when told to stop."""

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import envfleet
from command_line import RunSettings


class Checkpoints:
    """The checkpoints of a training, and what is in them besides the cluster's own: `parts`, and torch's generators.

    A part has `state_dict()` and `load_state_dict()`, as torch's modules and optimizers have. If the cluster goes on
    from a checkpoint, all parts are loaded from it here.
    """

    def __init__(self, cluster: envfleet.ClusterEnv, settings: RunSettings, **parts: Any) -> None:
        self._cluster, self._settings, self._parts = cluster, settings, parts
        self._saved_s = time.monotonic()
        self._has_news = False
        if cluster.resumed is not None:
            self._load(cluster.resumed.extra)
            print(f"Going on from {settings.resume_path}: {cluster.resumed}.", file=sys.stderr, flush=True)

    def save_when_due(self) -> None:
        """Call this after each update."""
        self._has_news = True
        if time.monotonic() - self._saved_s >= self._settings.checkpoint_every_s:
            self.save()

    def save(self) -> None:
        """Save now. Without an update nothing is saved: a job that never gets to one must not be requeued."""
        if self._settings.checkpoint is not None and self._has_news:
            extra = {name: part.state_dict() for name, part in self._parts.items()}
            self._write(self._settings.checkpoint, {**extra, "generators": self._generators()})
            self._saved_s, self._has_news = time.monotonic(), False

    def _write(self, path: str, extra: dict[str, Any]) -> None:
        self._cluster.save(path, extra=extra)

    def _generators(self) -> dict[str, Tensor]:
        """The states of torch's generators: the CPU's and, if the networks are elsewhere, that of their device."""
        accelerator, device = self._accelerator()
        return {"cpu": torch.get_rng_state()} | (
            {} if accelerator is None else {"device": accelerator.get_rng_state(*device)}
        )

    def _load(self, extra: Any) -> None:
        missing = [name for name in (*self._parts, "generators") if name not in (extra or ())]
        if missing:
            raise SystemExit(f"--resume: the checkpoint is not of this example and these flags; it has no {missing[0]}")
        for name, part in self._parts.items():
            part.load_state_dict(extra[name])
        torch.set_rng_state(extra["generators"]["cpu"])
        accelerator, device = self._accelerator()
        if accelerator is not None and "device" in extra["generators"]:
            accelerator.set_rng_state(extra["generators"]["device"], *device)

    def _accelerator(self) -> tuple[Any, list[torch.device]]:
        """Torch's module for the device, such as torch.cuda, and what its functions are told; None for the CPU."""
        device = torch.device(self._settings.device)
        return None if device.type == "cpu" else getattr(torch, device.type), [] if device.type == "mps" else [device]


class LearnerCheckpoints(Checkpoints):
    """The same for a learner that steps vector envs itself: `parts` alone, by torch.save; episodes begin anew."""

    def __init__(self, settings: RunSettings, **parts: Any) -> None:
        self._settings, self._parts = settings, parts
        self._saved_s = time.monotonic()
        self._has_news = False
        if settings.resume_path is not None:
            self._load(torch.load(settings.resume_path, map_location="cpu", weights_only=True))
            print(f"Going on from {settings.resume_path}.", file=sys.stderr, flush=True)

    def _write(self, path: str, extra: dict[str, Any]) -> None:
        torch.save({name: _without_arrays(part) for name, part in extra.items()}, f"{path}.new")
        os.replace(f"{path}.new", path)  # a kill at any moment leaves one of the two whole


def _without_arrays(part: dict[str, Any]) -> dict[str, Any]:
    """Arrays as tensors: torch reads them back without pickles."""
    return {name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in part.items()}


class Counters(SimpleNamespace):
    """A part for numbers: attributes, such as the env steps so far."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class SavedRows:
    """state_dict() and load_state_dict() of a replay buffer: the rows of its tensors that are in use."""

    num_added: int

    def __len__(self) -> int:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return {"num_added": self.num_added} | {name: rows[: len(self)] for name, rows in tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_added = state["num_added"]
        for name, rows in state.items():
            if name != "num_added":
                if len(rows) != len(self):
                    raise SystemExit(f"--resume: the checkpoint has a replay buffer of another size, {len(rows)} rows")
                getattr(self, name)[: len(rows)] = rows
