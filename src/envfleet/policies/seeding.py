"""Seeds of the random numbers with which a policy acts."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from envfleet.contract.policy import Policy, Seedable
from envfleet.policies.torch import random_states as torch_states


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


def random_states() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, as plain values.

    Returns:
        For set_random_states(). Without torch if that was not imported.
    """
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, np.array(numbers, np.uint64), gauss],
        "numpy": [name, np.array(keys), int(position), int(has_gauss), float(cached)],
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()  # the CPU's: a resumed worker may have other devices
    return states


def set_random_states(states: Mapping[str, Any]) -> bool:
    """Put the global generators into saved states.

    Args:
        states: what random_states() returned, in this process or another.

    Returns:
        Whether all are set; False: torch is not imported yet, call this again when it is.
    """
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
    if "numpy" in states:
        np.random.set_state(tuple(states["numpy"]))
    torch = sys.modules.get("torch")
    if "torch" in states and torch is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    return "torch" not in states or torch is not None


class SavesTorchGenerator:
    """What a policy with `_generator`, one of torch's own or None, needs for checkpoints: see SavesRandomState.

    Numbers are drawn on the CPU, so that they are the same wherever the policy's module is. A policy that draws on
    another device has a seed() of its own, which makes the generator there.
    """

    _generator: Any
    _torch: Any

    def seed(self, seed: int) -> None:
        """Draw from a generator of its own from now on.

        Args:
            seed: of the generator.
        """
        self._generator = self._torch.Generator().manual_seed(seed)

    def get_random_state(self) -> bytes | None:
        """Return the state of the policy's generator.

        Returns:
            Bytes for set_random_state(); None: it was never seeded.
        """
        return None if self._generator is None else self._generator.get_state().numpy().tobytes()

    def set_random_state(self, state: bytes | None) -> None:
        """Go on with random numbers from a saved state.

        Args:
            state: what get_random_state() of another copy returned.
        """
        self._generator = None
        if state is not None:
            self.seed(0)  # only seed() knows on which device this policy draws
            self._generator.set_state(self._torch.frombuffer(bytearray(state), dtype=self._torch.uint8))


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch at the end: draws inside leave no trace."""
    python, numpy, torch = random.getstate(), np.random.get_state(), sys.modules.get("torch")
    of_torch = None if torch is None else torch_states.random_states(torch)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None and of_torch is not None:
            torch_states.set_random_states(torch, of_torch)
