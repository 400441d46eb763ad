"""assert_array_equal: NumPy's, made quick for the sweeps that compare millions of rows."""

import numpy as np
import numpy.testing


def assert_array_equal(got, expected, err_msg=""):
    """Require equal shapes and values. NumPy's takes 85 us: it is asked if a check of 7 us finds a difference."""
    if not np.array_equal(got, expected):
        numpy.testing.assert_array_equal(got, expected, err_msg=err_msg)
