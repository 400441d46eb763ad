"""Seeds of the random numbers with which a policy acts."""

from __future__ import annotations

import random
import sys

import numpy as np

from envfleet.contract.policy import Policy, Seedable


def seed_policy(policy: Policy, seed: int) -> None:
    """Seed the policy's own generator, and the global ones of Python, NumPy and torch. For a worker's process.

    Args:
        policy: the worker's copy.
        seed: for all of them.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    if isinstance(policy, Seedable):
        policy.seed(seed)
