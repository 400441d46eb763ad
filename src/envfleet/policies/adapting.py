"""Agents of the user's as a Policy: its code and weights at the head, and the copy on a worker."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import cloudpickle
import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.errors import UsageError
from envfleet.contract.policy import Policy, PolicyCode
from envfleet.policies.by_path import PolicySpec, imported
from envfleet.policies.functions import FunctionPolicy
from envfleet.policies.recurrent import RecurrentTorchPolicy, is_recurrent
from envfleet.policies.torch_arrays import state_arrays, tensor_arrays
from envfleet.policies.torch_forward import acts_by_forward
from envfleet.policies.torch_module import TorchPolicy

METHODS = ("act", "log_prob", "values", "get_weights", "set_weights")

# While a policy is unpickled: what it acts on; None: the CPU.
_worker_device: ContextVar[str | None] = ContextVar("worker_device", default=None)


def is_policy_like(agent: Any) -> bool:
    """Tell whether a value is meant as an agent, not as actions. as_policy() may still refuse it.

    Args:
        agent: what the user passed.

    Returns:
        True for a Policy, PolicySpec, torch module or pair of functions.
    """
    if isinstance(agent, (np.ndarray, np.generic, list, Mapping, int, float, str, bytes, type)):
        return False
    return isinstance(agent, (PolicySpec, Policy)) or _is_function_pair(agent) or _is_torch_module(agent)


def as_policy(agent: Any) -> Policy:
    """Turn an agent into a Policy.

    Args:
        agent: a Policy, torch module, pair of functions or PolicySpec.

    Returns:
        A Policy that shares its weights with the agent; that of a PolicySpec is built here, with weights of its own.

    Raises:
        UsageError: the agent is none of these.
    """
    if isinstance(agent, Policy) and not isinstance(agent, type):
        return agent
    if isinstance(agent, PolicySpec):
        policy = _built(agent.factory, agent.kwargs)
        if agent.weights is not None:
            policy.set_weights(weights_of(agent))
        return policy
    if _is_torch_module(agent) and (hasattr(agent, "get_action_and_value") or acts_by_forward(agent)):
        return RecurrentTorchPolicy(agent) if is_recurrent(agent) else TorchPolicy(agent)
    if _is_function_pair(agent):
        return FunctionPolicy(*agent)
    raise UsageError(
        f"an agent is a Policy ({', '.join(METHODS)}), a torch module with get_action_and_value(obs, action=None) "
        f"or forward(obs, action=None) -> action, log_prob, entropy, value or, if it remembers, "
        f"get_action_and_value(obs, lstm_state, done, action=None), a pair of functions (act, log_prob), or a "
        f"PolicySpec; got {_described(agent)}"
    )


def code_of(agent: Any) -> PolicyCode:
    """Return how workers build their copy of an agent.

    Tensors of a pickle are on the CPU. Classes and functions of __main__ and of notebooks are pickled by value, those
    of other modules by name.

    Args:
        agent: as for as_policy().

    Returns:
        The path of a PolicySpec, or else a pickle.

    Raises:
        UsageError: the agent is none, or cannot be pickled.
    """
    if isinstance(agent, PolicySpec):
        return PolicyCode(factory=agent.factory, kwargs=dict(agent.kwargs))
    policy = as_policy(agent)
    pickled = io.BytesIO()
    try:
        _CpuPickler(pickled).dump(partial(as_policy, policy))
    except Exception as error:  # whatever the user's own __reduce__ or __getstate__ may raise
        raise UsageError(
            f"this agent ({_described(agent)}) cannot be pickled for the workers: {type(error).__name__}: {error}. "
            f"Keep what cannot travel (files, loggers, envs, locks) out of it, or pass a PolicySpec"
        ) from error
    return PolicyCode(pickled=pickled.getvalue())


def weights_of(agent: Any) -> dict[str, Array]:
    """Return the agent's present weights.

    Args:
        agent: as for as_policy().

    Returns:
        CPU arrays by name, which may be views; empty if there is nothing to publish.

    Raises:
        UsageError: the agent is none, or a weight is no array.
    """
    if not isinstance(agent, PolicySpec):
        return as_policy(agent).get_weights()
    source = agent.weights
    if source is None:
        return {}
    if isinstance(source, Mapping):
        torch = sys.modules.get("torch")
        tensors = {name: each for name, each in source.items() if torch is not None and isinstance(each, torch.Tensor)}
        arrays = tensor_arrays(tensors) if tensors else {}
        return {name: arrays[name] if name in arrays else np.asarray(each) for name, each in source.items()}
    if _is_torch_module(source) and not isinstance(source, Policy):
        return state_arrays(getattr(source, "_orig_mod", source))
    return as_policy(source).get_weights()


def build_policy(code: PolicyCode, device: str | None = None) -> Policy:
    """Build a worker's copy of the policy. The code comes from the head, which the worker trusts.

    Args:
        code: as code_of() returned it at the head.
        device: what a torch.device that was an accelerator of the learner's becomes here; None: the CPU. Weights are
            on the CPU, whatever this is: MovesToDevice.to_device() moves them.

    Returns:
        The policy.

    Raises:
        UsageError: a module is missing on this worker, or the factory returned no agent.
    """
    if code.pickled is not None:
        token = _worker_device.set(device)
        try:
            make: Callable[[], Policy] = cloudpickle.loads(code.pickled)
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"the policy cannot be unpickled here: {type(error).__name__}: {error}. Its module must be "
                f"installed, or on PYTHONPATH, on every worker; or call cloudpickle.register_pickle_by_value(module) "
                f"at the head, which sends the code along"
            ) from error
        finally:
            _worker_device.reset(token)
        return make()
    if code.factory is None:
        raise UsageError("this PolicyCode has neither a pickle nor a factory")
    return _built(code.factory, code.kwargs)


class _CpuPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """What is on an accelerator of the learner's does not need it to be unpickled; the originals stay where they are.

    Tensors become those of the CPU, values of torch.device and random generators those of the worker's device.
    """

    def reducer_override(self, thing: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(thing, torch.device) and thing.type != "cpu":
                return _device_of_worker, ()
            if isinstance(thing, torch.Generator) and thing.device.type != "cpu":
                return _generator_of_worker, ()  # its state means nothing on another device
            # A parameter is pickled as its .data, which comes by here in its turn.
            is_plain = isinstance(thing, torch.Tensor) and not isinstance(thing, torch.nn.Parameter)
            if is_plain and not thing.is_cpu:
                return thing.detach().cpu().requires_grad_(thing.requires_grad).__reduce_ex__(2)
        return super().reducer_override(thing)


def _device_of_worker() -> Any:
    import torch

    return torch.device(_worker_device.get() or "cpu")


def _generator_of_worker() -> Any:
    import torch

    return torch.Generator(_worker_device.get() or "cpu")


def _built(factory: str, kwargs: Mapping[str, Any]) -> Policy:
    try:
        make = imported(factory)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the policy's factory {factory!r} cannot be imported: {type(error).__name__}: {error}. Its module must be "
            f"installed, or on PYTHONPATH, on every worker"
        ) from error
    made = make(**kwargs)
    try:
        return as_policy(made)
    except UsageError as error:
        raise UsageError(f"what the factory {factory!r} returned is no agent: {error}") from error


def _is_torch_module(agent: Any) -> bool:
    torch = sys.modules.get("torch")  # a caller that has a module has imported torch
    return torch is not None and hasattr(torch, "nn") and isinstance(agent, torch.nn.Module)


def _is_function_pair(agent: Any) -> bool:
    """A pair of torch modules, such as actor and critic, is none: they do not take arrays."""
    if not isinstance(agent, tuple) or len(agent) != 2:
        return False
    return all(callable(each) and not _is_torch_module(each) for each in agent)


def _described(agent: Any) -> str:
    if isinstance(agent, type):
        return f"the class {agent.__qualname__}, not an object of it"
    kind = type(agent).__name__
    if isinstance(agent, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in agent) or 'nothing'}"
    if _is_torch_module(agent) and not hasattr(agent, "get_action_and_value"):
        return (
            f"{kind}, a torch module without get_action_and_value, and its forward is not forward(obs, action=None) (a "
            f"Q network goes into EpsilonGreedy, SAC's actor into SquashedGaussian, TD3's into GaussianNoise)"
        )
    if hasattr(agent, "get_action_and_value") and not _is_torch_module(agent):
        return f"{kind}, which has get_action_and_value but is no torch.nn.Module"
    has = [name for name in METHODS if hasattr(agent, name)]
    if has and len(has) < len(METHODS):
        return f"{kind}, which lacks {', '.join(name for name in METHODS if name not in has)}"
    return kind
