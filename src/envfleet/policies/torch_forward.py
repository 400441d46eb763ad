"""Torch modules that act by forward(obs, action=None), as the example agent of the package ClusterEnv does."""

from __future__ import annotations

import inspect
from typing import Any

from envfleet.contract.distributions import Categorical
from envfleet.policies.torch_arrays import TorchBorder
from envfleet.policies.torch_modes import modes_instead_of_samples

TOLERANCE = 1e-4  # of log-probs that are computed in two ways


def acts_by_forward(module: Any) -> bool:
    """Whether forward() of a torch module takes `obs`, and `action` that is None by default; nothing else is required.

    So Q networks, actors alone and critics of (obs, action) are told from it: none of them has such an argument.
    """
    module = getattr(module, "_orig_mod", module)
    if hasattr(module, "get_action_and_value"):
        return False
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (AttributeError, TypeError, ValueError):
        return False
    if len(parameters) < 2 or parameters[0].default is not parameters[0].empty:
        return False
    is_optional = all(each.default is not each.empty for each in parameters[1:] if each.kind is not each.VAR_KEYWORD)
    return is_optional and parameters[1].name == "action" and parameters[1].default is None


def distribution_of_actor(border: TorchBorder, obs: Any, num_rows: int) -> Categorical | None:
    """Compute the distribution of the actions from the logits that `module.actor(obs)` gives.

    That these are what forward() draws from is checked on all rows, each time: the log-probs that forward() returns
    for the most likely actions must be those of the logits.

    Args:
        border: of a module that acts by forward.
        obs: tensors of B observations.
        num_rows: B.

    Returns:
        The distribution for B rows; None: there is no such actor, or it gives something else.
    """
    torch, module = border.torch, border.module
    actor = getattr(module, "actor", None)
    if not isinstance(actor, torch.nn.Module) or not isinstance(obs, torch.Tensor):
        return None
    with torch.no_grad():
        try:
            logits = actor(obs)
            with modes_instead_of_samples(torch, module, "forward"):
                actions, log_probs, *_ = module(obs)
        except Exception:  # this actor takes or gives something else; errors of forward itself show in acting
            return None
        if not _are_log_probs_of(torch, logits, actions, log_probs, num_rows):
            return None
        return Categorical(border.arrays(torch.log_softmax(logits.float(), -1)))


def _are_log_probs_of(torch: Any, logits: Any, actions: Any, log_probs: Any, num_rows: int) -> bool:
    if not all(isinstance(each, torch.Tensor) for each in (logits, actions, log_probs)):
        return False
    if logits.dim() != 2 or not logits.is_floating_point() or actions.is_floating_point():
        return False
    if actions.numel() != num_rows or log_probs.numel() != num_rows or len(logits) != num_rows:
        return False
    chosen = actions.reshape(num_rows, 1).long()
    if not bool(((chosen >= 0) & (chosen < logits.shape[1])).all()):
        return False
    expected = torch.log_softmax(logits.float(), -1).gather(1, chosen).reshape(-1)
    return bool(torch.allclose(log_probs.reshape(-1).float(), expected, rtol=TOLERANCE, atol=TOLERANCE))
