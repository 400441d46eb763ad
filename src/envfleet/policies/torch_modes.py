"""Modes instead of samples: a torch module runs as it is, and whatever it draws comes out as what is most likely."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from envfleet.contract.errors import UsageError
from envfleet.policies.torch_random import have_drawn, random_states, set_random_states

OWN_METHOD = "get_deterministic_action"


@contextlib.contextmanager
def modes_instead_of_samples(torch: Any, module: Any, method: str = "get_action_and_value") -> Iterator[None]:
    """Have torch's random operations give their modes, in this thread only.

    The argmax of multinomial (Categorical), the mean of normal (Normal, also below a tanh), 1 where bernoulli has more
    than 0.5, 0 for standard normal noise. Nothing is drawn from torch's generators.

    Args:
        torch: the package.
        module: the module that runs inside, for the error text.
        method: the method of it that runs, for the error text.

    Raises:
        UsageError: at the end, if the module has drawn random numbers all the same, by another operation.
    """
    before = random_states(torch)
    with _mode_class(torch)():
        yield
    if have_drawn(torch, before):
        set_random_states(torch, before)
        raise UsageError(
            f"{method} of {type(module).__name__} draws random numbers whose mode is not known (known are "
            f"Categorical, Bernoulli, Normal and what is made of them): give the module {OWN_METHOD}(obs), which "
            f"returns the actions without chance (with lstm_state and done, and the next lstm_state as a second "
            f"result, if it remembers). If the numbers are those of dropout, call eval() on the module"
        )


@cache
def _mode_class(torch: Any) -> Any:
    replacements = _replacements(torch)

    class Modes(torch.overrides.TorchFunctionMode):  # type: ignore[misc]  # torch comes as an argument
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # By name: a function of torch and the method of tensors are two objects that do the same.
            replacement = replacements.get(getattr(function, "__name__", ""), function)
            return replacement(*args, **(kwargs or {}))

    return Modes


def _replacements(torch: Any) -> dict[str, Callable[..., Any]]:
    def multinomial(probs: Any, num_samples: int = 1, *args: Any, **kwargs: Any) -> Any:
        best = probs.argmax(-1, keepdim=True)
        return best.expand(*best.shape[:-1], num_samples).clone()

    def normal(mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> Any:
        if isinstance(mean, torch.Tensor):
            shape = mean.shape if not isinstance(std, torch.Tensor) else torch.broadcast_shapes(mean.shape, std.shape)
            return mean.expand(shape).clone()
        if isinstance(std, torch.Tensor):
            return torch.full_like(std, mean)
        size = args[0] if args else kwargs.pop("size")
        kwargs.pop("generator", None)
        return torch.full(size, float(mean), **kwargs)

    def normal_(tensor: Any, mean: float = 0.0, *args: Any, **kwargs: Any) -> Any:
        return tensor.fill_(mean)

    def bernoulli(probs: Any, *args: Any, **kwargs: Any) -> Any:
        return (probs > 0.5).to(probs.dtype)

    def randn(*size: Any, **kwargs: Any) -> Any:
        kwargs.pop("generator", None)
        return torch.zeros(*size, **kwargs)

    return {
        "multinomial": multinomial,
        "normal": normal,
        "normal_": normal_,
        "bernoulli": bernoulli,
        "randn": randn,
        "randn_like": torch.zeros_like,
    }
