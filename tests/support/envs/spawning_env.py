"""An env with processes of its own, as simulators have them. Scripts and workers import this module by its name."""

import subprocess

import gymnasium
import numpy as np
from gymnasium import spaces


class SpawningEnv(gymnasium.Env):
    """Starts a process, one in a session of its own, and a daemon whose parent has ended; it never ends them."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self):
        self._processes = [
            subprocess.Popen(["sleep", "1000"]),
            subprocess.Popen(["sleep", "1000"], start_new_session=True),
        ]
        shell = "(setsid sh -c 'sleep 1000; true' > /dev/null & echo $!)"
        daemon = subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, check=True)
        self._daemon = int(daemon.stdout)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def pids(self):
        return [*(process.pid for process in self._processes), self._daemon]
