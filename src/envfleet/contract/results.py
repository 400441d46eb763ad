"""Checks of what reset() and step() of an env return. Every backend refuses the same results, here."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

import numpy as np

from envfleet.contract.arrays import Array
from envfleet.contract.errors import EnvFleetError
from envfleet.contract.spaces import Leaf, SpaceTree

_NUMBERS = (int, float, np.integer, np.floating, np.bool_)


class WrongResult(EnvFleetError):
    """An env returned something that Gymnasium's API or its own spaces do not allow."""


def reset_result(result: Any) -> tuple[Any, dict[str, Any]]:
    """Check the result of a reset(), except for the observation (see ObservationCheck).

    Args:
        result: what the env returned.

    Returns:
        obs and info.

    Raises:
        WrongResult: it is not (obs, info).
    """
    try:
        obs, info = result
    except (TypeError, ValueError):
        raise WrongResult(f"its reset() must return (obs, info); got {described(result)}") from None
    return obs, info if type(info) is dict else require_info(info, "reset()")


def step_result(result: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """Check the result of a step(), except for the observation (see ObservationCheck).

    Args:
        result: what the env returned.

    Returns:
        obs, reward, terminated, truncated and info; numbers are Python's own.

    Raises:
        WrongResult: it is not (obs, reward, terminated, truncated, info), or a part is of the wrong kind.
    """
    try:
        obs, reward, terminated, truncated, info = result
    except (TypeError, ValueError):
        raise _no_step(result) from None
    if type(reward) is not float:
        reward = _number(reward)
    if type(terminated) is not bool:
        terminated = _flag(terminated, "terminated")
    if type(truncated) is not bool:
        truncated = _flag(truncated, "truncated")
    return obs, reward, terminated, truncated, info if type(info) is dict else require_info(info, "step()")


def vector_step_result(result: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Check that a vector env's step() returned five things, the last of which is an info.

    Args:
        result: what the vector env returned.

    Returns:
        obs, rewards, terminated, truncated and info.

    Raises:
        WrongResult: it is something else.
    """
    try:
        obs, rewards, terminated, truncated, info = result
    except (TypeError, ValueError):
        raise _no_step(result) from None
    return obs, rewards, terminated, truncated, require_info(info, "step()")


def _no_step(result: Any) -> WrongResult:
    form = "(obs, reward, terminated, truncated, info)"
    return WrongResult(f"its step() must return {form}; got {described(result)}")


def require_info(info: Any, of: str) -> dict[str, Any]:
    """Check an info.

    Args:
        info: what the env returned.
        of: the call, for the error text.

    Returns:
        The info as a dict.

    Raises:
        WrongResult: it is no mapping.
    """
    if isinstance(info, dict):
        return info
    if isinstance(info, Mapping):
        return dict(info)
    raise WrongResult(f"the info of its {of} must be a dict; got {described(info)}")


def number_rows(values: Any, num_rows: int, name: str) -> Array:
    """Check an array with one number for each env of a vector env.

    Args:
        values: what the vector env returned.
        num_rows: number of envs.
        name: what the error calls it.

    Returns:
        [num_rows] array.

    Raises:
        WrongResult: it has another shape, or holds no numbers.
    """
    array = np.asarray(values)
    if array.shape != (num_rows,) or array.dtype.kind not in "biuf":
        raise WrongResult(f"the {name} of its step() must be an array of {num_rows} numbers; got {described(values)}")
    return array


class ObservationCheck:
    """Refuses observations that their space cannot hold: of another form, shape, or kind of number.

    A dtype that differs from the space's is cast if NumPy calls that "same_kind" (float64 to float32, int to float), as
    Gymnasium's vector envs do. Python's own integers have no dtype: they are accepted if they are in its range.

    Attributes:
        check: takes the observation of one env; raises WrongResult.
    """

    def __init__(self, tree: SpaceTree) -> None:
        self._tree = tree
        # Check the observation of one env: a plain function, since it is called in every step.
        self.check: Callable[[Any], None] = _array_check(tree.leaves[0]) if tree.is_one_array else self._check_tree

    def _check_tree(self, obs: Any) -> None:
        for leaf, value in zip(self._tree.leaves, self._flat(obs), strict=True):
            if leaf.dtype is not None:
                _require_leaf(value, leaf)

    def batch(self, obs: Any, num_rows: int) -> Any:
        """Check the observations of a vector env.

        Args:
            obs: of `num_rows` envs together.
            num_rows: number of envs.

        Returns:
            The observations in the dtypes of their space.

        Raises:
            WrongResult: the space cannot hold them.
        """
        leaves = []
        for leaf, value in zip(self._tree.leaves, self._flat(obs), strict=True):
            if leaf.dtype is None:
                _require_rows(value, leaf, num_rows)
                leaves.append(value)
            else:
                array = value if isinstance(value, np.ndarray) else np.asarray(value)
                _require_array(array, leaf, (num_rows, *leaf.shape))
                leaves.append(array.astype(leaf.dtype, copy=False))
        return self._tree.unflatten(leaves)

    def _flat(self, obs: Any) -> list[Any]:
        try:
            return self._tree.flatten(obs)
        except Exception as error:  # `obs` may be anything, and raise anything
            space = self._tree.space
            raise WrongResult(f"its observation has not the form of {space}: {error!r}") from None


def _array_check(leaf: Leaf) -> Callable[[Any], None]:
    assert leaf.dtype is not None  # the leaf is an array
    # NumPy has one dtype object of each kind of number, but unpickles others that are only equal to it.
    array_type, dtype, shape = np.ndarray, np.dtype(leaf.dtype.str), leaf.shape

    def check(obs: Any) -> None:
        # Nearly always true: a quick way past all other checks.
        if not (type(obs) is array_type and obs.dtype is dtype and obs.shape == shape):
            _require_leaf(obs, leaf)

    return check


def _require_leaf(value: Any, leaf: Leaf) -> None:
    if isinstance(value, np.ndarray | np.generic):
        _require_array(value, leaf, leaf.shape)
        return
    try:
        array = np.asarray(value)
    except Exception as error:  # lists of different lengths; what another library does not convert
        raise _refused(leaf, leaf.shape, f"{described(value)} ({error})") from None
    if array.dtype.kind in "iu" and leaf.dtype is not None and leaf.dtype.kind in "iu":
        bounds = np.iinfo(leaf.dtype)
        if array.shape == leaf.shape and array.size and bounds.min <= array.min() and array.max() <= bounds.max:
            return
    _require_array(array, leaf, leaf.shape, described(value))


def _require_array(array: Any, leaf: Leaf, shape: tuple[int, ...], got: str | None = None) -> None:
    # NumPy would broadcast a smaller array silently, and cast from float to integer without a word.
    if array.shape != shape:
        raise _refused(leaf, shape, got or f"shape {array.shape}")
    if array.dtype != leaf.dtype and not np.can_cast(array.dtype, leaf.dtype or object, "same_kind"):
        raise _refused(leaf, shape, got or f"dtype {array.dtype}, which does not convert to it safely")


def _require_rows(value: Any, leaf: Leaf, num_rows: int) -> None:
    if not isinstance(value, tuple | list | np.ndarray) or len(value) != num_rows:
        name = leaf.name_in("observation")
        raise WrongResult(f"its {name} must be a tuple of {num_rows} values, one for each env; got {described(value)}")


def _refused(leaf: Leaf, shape: tuple[int, ...], got: str) -> WrongResult:
    return WrongResult(
        f"its {leaf.name_in('observation')} must be an array of shape {shape} and dtype {leaf.dtype}, "
        f"as its space says; got {got}"
    )


def described(value: Any) -> str:
    """Describe a value in a few words for an error text: the value may be large, and its repr() may raise."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {reprlib.repr(value)}" if value is not None else "None"


def _number(reward: Any) -> float:
    try:
        return float(reward if isinstance(reward, _NUMBERS) else _one_number(reward))
    except Exception:  # several numbers, or none; a number beyond all floats
        raise WrongResult(f"the reward of its step() must be a number; got {described(reward)}") from None


def _flag(value: Any, name: str) -> bool:
    try:
        return bool(value if isinstance(value, _NUMBERS) else _one_number(value))
    except Exception:
        raise WrongResult(f"{name} of its step() must be True or False; got {described(value)}") from None


def _one_number(value: Any) -> SupportsFloat:
    """Return the number in an array of any library; raise if there are several."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, SupportsFloat):
        raise TypeError
    return number
