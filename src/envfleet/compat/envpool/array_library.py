"""ArrayLibrary: NumPy, or JAX inside of compiled programs; what makes EnvPool's batches of ours is written for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class ArrayLibrary(NamedTuple):
    """Functions under NumPy's names, and the dtypes that the library has at present."""

    functions: Any
    dtype_of: Callable[[Any], Any]


NUMPY = ArrayLibrary(np, np.dtype)
