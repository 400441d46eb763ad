"""Seeds of the random numbers with which a policy acts."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np

from envfleet.contract.policy import Policy, Seedable
from envfleet.policies.torch_random import random_states, set_random_states


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


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Put the global generators of Python, NumPy and torch back at the end: what is drawn inside counts for nobody."""
    python, numpy, torch = random.getstate(), np.random.get_state(), sys.modules.get("torch")
    of_torch = None if torch is None else random_states(torch)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None and of_torch is not None:
            set_random_states(torch, of_torch)
