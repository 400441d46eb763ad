"""States of torch's random generators: the CPU's, and those of accelerators that this process has used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

States = Mapping[str, Sequence[Any]]  # by kind of device: a state for each device of this kind


def random_states(torch: Any) -> States:
    """Return the states of all generators that this process may draw from."""
    states = {"cpu": [torch.get_rng_state()]}
    for kind in ("cuda", "xpu", "mps", torch._C._get_privateuse1_backend_name()):
        module = getattr(torch, kind, None)
        if module is not None and hasattr(module, "get_rng_state") and _is_in_use(torch, kind, module):
            has_several = hasattr(module, "get_rng_state_all")
            states[kind] = module.get_rng_state_all() if has_several else [module.get_rng_state()]
    return states


def set_random_states(torch: Any, states: States) -> None:
    """Put generators back to states that random_states() has returned."""
    for kind, values in states.items():
        module = torch if kind == "cpu" else getattr(torch, kind)
        if hasattr(module, "set_rng_state_all"):
            module.set_rng_state_all(values)
        else:
            module.set_rng_state(values[0])


def have_drawn(torch: Any, before: States) -> bool:
    """Whether random numbers were drawn since random_states() has returned `before`."""
    now = random_states(torch)
    return not all(
        torch.equal(old, new) for kind in before for old, new in zip(before[kind], now.get(kind, ()), strict=True)
    )


def _is_in_use(torch: Any, kind: str, module: Any) -> bool:
    """Never initialises a device: that takes seconds and memory."""
    if kind == "mps":  # which knows no state of its own
        return bool(torch.backends.mps.is_available())
    return bool(getattr(module, "is_initialized", module.is_available)())
