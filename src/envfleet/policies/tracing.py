"""Tracing how a module acts: torch's own operations without the Python between them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from envfleet.policies.torch_random import random_states, set_random_states

logger = logging.getLogger("envfleet.policies")

Acting = Callable[[Any], tuple[Any, Any, Any]]


def traced_acting(torch: Any, module: Any, obs: Any, method: str = "get_action_and_value") -> Acting | None:
    """Record how a module acts as torch's own operations, without the Python between them.

    Operations are recorded, so a branch that depends on the values of observations is not. Weights are not recorded:
    they may change.

    Args:
        torch: the package.
        module: whose method is recorded.
        obs: an example; the result is for tensors of its shape and dtype.
        method: what is recorded, `get_action_and_value` or `forward`.

    Returns:
        A function `obs -> actions, log_probs, values`; None if the module cannot be traced, or the traced one differs.
    """

    class Acts(torch.nn.Module):  # type: ignore[misc]  # torch comes as an argument
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, obs: Any) -> tuple[Any, Any, Any]:
            action, log_prob, _, value = getattr(self.module, method)(obs)
            return action, log_prob, value

    acts, before = Acts(), random_states(torch)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # trace() is deprecated; its successors take seconds to compile
        try:
            traced = torch.jit.trace(acts, (obs,), check_trace=False)
            are_equal = all(_are_equal(torch, acts, traced, each) for each in (obs, obs.flip(0), torch.zeros_like(obs)))
        except Exception as error:
            logger.warning("the policy cannot be traced, and acts as it is: %s: %s", type(error).__name__, error)
            return None
        finally:
            set_random_states(torch, before)
    if not are_equal:
        logger.warning("the traced policy does not act as the policy does, which is therefore used as it is")
        return None
    acting: Acting = traced
    return acting


def _are_equal(torch: Any, acts: Any, traced: Any, obs: Any) -> bool:
    states = random_states(torch)
    expected = acts(obs)
    set_random_states(torch, states)
    return all(torch.equal(mine, theirs) for mine, theirs in zip(traced(obs), expected, strict=True))
