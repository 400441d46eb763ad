"""worker_device: whether the launcher asks its engine for what the workers' policies are to act on."""

from __future__ import annotations

import logging

from envfleet.launchers.launcher import Launcher

logger = logging.getLogger("envfleet.cluster")


def warn_if_no_gpu_was_asked_for(launcher: Launcher | None, device: str | None) -> None:
    """Log a warning if workers shall act on a GPU, and the launcher, which can ask for one, does not.

    It is no error: nodes may have GPUs that nobody needs to ask for, or other options of the engine ask for them.

    Args:
        launcher: The user's.
        device: The user's worker_device.
    """
    asked = getattr(launcher, "gpus_per_worker", None)
    if device is None or device == "cpu" or asked is None or str(asked).rpartition(":")[2].strip("0."):
        return
    name = type(launcher).__name__
    logger.warning(
        "worker_device=%r, but %s(gpus_per_worker=%r) asks for no GPU: %s(gpus_per_worker=1) asks for one for each "
        "worker",
        *(device, name, asked, name),
    )
