"""Names for the array types that all layers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = np.ndarray[Any, Any]  # of any dtype
IntArray = NDArray[np.int32]  # env ids
FloatArray = NDArray[np.float64]  # rewards and what is computed from them
BoolArray = NDArray[np.bool_]
Arrays = Mapping[str, Array]  # by name
