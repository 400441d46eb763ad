"""What the image rows of benchmarks/cluster.py share: the size of an observation of ring.h, and an idle policy."""

from __future__ import annotations

import numpy as np

OBS_BYTES = 4 * 84 * 84


def no_action(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A policy that costs nothing either; not beside the agent, which would bring torch along."""
    num_rows = len(obs)
    return np.zeros(num_rows, np.int64), np.zeros(num_rows, np.float32)


def no_action_with_weights(weights: dict[str, np.ndarray], obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for a policy whose weights are pulled, and not used."""
    return no_action(obs)
