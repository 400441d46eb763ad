"""Names for the array types that all layers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = np.ndarray[Any, Any]  # of any dtype
IntArray = NDArray[np.int32]  # env ids
FloatArray = NDArray[np.float64]  # rewards and what is computed from them
BoolArray = NDArray[np.bool_]
Arrays = Mapping[str, Array]  # by name


class AnyArray(Protocol):
    """What arrays of NumPy and tensors of torch have in common."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""

    def tolist(self) -> Any:
        """Return the values as nested lists of Python numbers."""


if TYPE_CHECKING:
    from typing_extensions import TypeVar  # Python 3.11 has no default for type variables

    ArrayT = TypeVar("ArrayT", bound=AnyArray, default=Array)
else:
    from typing import TypeVar

    ArrayT = TypeVar("ArrayT", bound=AnyArray)

# Values of a space: one array; a dict or tuple of trees, in the form of a Dict or Tuple space; a tuple of objects for a
# space whose values are no arrays (Text, Graph, ...).
Tree: TypeAlias = ArrayT | Mapping[str, "Tree[ArrayT]"] | tuple[Any, ...]
