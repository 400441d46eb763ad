"""How fast is an envfleet pool compared with its peers, on the same machine and in the same run?

    python -m benchmarks.pool                         every row, about fifteen minutes
    python -m benchmarks.pool --rows cpu cartpole-64  some rows
    python -m benchmarks.pool --quick                 does it run? Its numbers are not to be quoted

All contenders of a row are built, warmed up, and measured in turn (A, B, A, B, ...) in short windows, so that
a disturbance of the machine meets all of them. Only ratios within a run mean anything.

The peers are the `bench` extra: envpool; stable-baselines3 and tianshou (both need torch); box2d and pygame for
LunarLander. One that is missing is reported as not installed. The C++ loop needs a compiler (`$CXX`, or c++).

simulators.py measures MuJoCo, Atari and Box2D in the same way.
"""

from __future__ import annotations

import sys

from benchmarks.harness.command import Benchmark
from benchmarks.rows.native_rows import NATIVE_ROWS
from benchmarks.rows.pool_row import start_pools
from benchmarks.rows.python_rows import PYTHON_ROWS

# In this order: processes are forked before any peer has started threads in this one.
POOL = Benchmark(table="pool", rows=(*PYTHON_ROWS, *NATIVE_ROWS), start_for=start_pools)

if __name__ == "__main__":
    sys.exit(POOL.run(POOL.parser(__doc__).parse_args()))
