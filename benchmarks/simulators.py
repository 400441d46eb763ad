"""How fast are the simulators people use, compared with EnvPool's? The rows of MuJoCo, Box2D and Atari.

    python -m benchmarks.simulators                        every row, about fifteen minutes
    python -m benchmarks.simulators --rows ant-64 pong-16  some rows

It measures as benchmarks/pool.py does.
"""

from __future__ import annotations

import sys

from benchmarks.harness.command import Benchmark
from benchmarks.rows.atari_rows import ATARI_ROWS
from benchmarks.rows.contenders import GYMNASIUM_SYNC
from benchmarks.rows.native_rows import async_row, sync_row
from benchmarks.rows.pool_row import Peer, start_pools

# EnvPool has a MuJoCo of its own (3.6.0), envfleet the installed one.
MUJOCO_ROWS = (
    sync_row("ant-1", "Ant-v5", 1, 1.9, Peer(GYMNASIUM_SYNC)),
    sync_row("ant-64", "Ant-v5", 64, 1.15),
    sync_row("ant-256", "Ant-v5", 256, 1.15),
    async_row("ant-async", "Ant-v5", 64, 1.05),
    async_row("ant-256-async", "Ant-v5", 256, 1.05),
    sync_row("halfcheetah", "HalfCheetah-v5", 64, 1.2),
    async_row("halfcheetah-async", "HalfCheetah-v5", 64, 1.05),
    sync_row("hopper", "Hopper-v5", 64, 1.2),
    async_row("hopper-async", "Hopper-v5", 64, 1.05),
    sync_row("humanoid", "Humanoid-v5", 64, 1.2),
    async_row("humanoid-async", "Humanoid-v5", 64, 1.05),
)

# EnvPool has Box2D 2.3.0 in itself, as Gymnasium's wheel; envfleet runs the system's 2.4.1.
BOX2D_ROWS = (
    sync_row("lunarlander-native", "LunarLander-v3", 64, 1.1),
    async_row("lunarlander-native-async", "LunarLander-v3", 64, 1.05),
    sync_row("bipedalwalker", "BipedalWalker-v3", 64, None),
)

SIMULATORS = Benchmark(table="simulators", rows=(*ATARI_ROWS, *MUJOCO_ROWS, *BOX2D_ROWS), start_for=start_pools)

if __name__ == "__main__":
    sys.exit(SIMULATORS.run(SIMULATORS.parser(__doc__).parse_args()))
