"""Steps and resets of remote envs: what errors name, which seeds arrive, which infos are too large."""

import threading

import gymnasium
import numpy as np
import pytest

import envfleet
from envfleet import ClusterEnv, ClusterTimeout, StepOnEndedEpisode, WorkerFailed
from envfleet.cluster.head import socket as head_socket
from envfleet.cluster.wire.codec import encode
from envfleet.cluster.wire.messages import Chunk
from tests.support.agents import numpy_agents
from tests.support.cluster.hand_worker import ByHand, HandWorker

pytestmark = pytest.mark.usefixtures("quick_workers")


class Ending(gymnasium.Env):
    """Ends after `length` steps; its observation is a number drawn at the reset. `info` may be large."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=1000, num_numbers=0):
        self._length, self._num_numbers = length, num_numbers

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._num_steps = 0
        self._obs = self.np_random.random(1)
        return self._obs, {}

    def step(self, action):
        self._num_steps += 1
        info = {"numbers": [1] * self._num_numbers} if self._num_numbers else {}
        return self._obs, 0.0, self._num_steps >= self._length, False, info


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_step_on_an_ended_episode_names_the_env_of_the_whole_run(backend):
    lengths = [1000, 1000, 1000, 1]
    factories = [lambda length=length: Ending(length) for length in lengths]
    with ClusterEnv(factories, 2, 2, backend=backend, autoreset_mode="disabled") as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(4, np.int64))
        with pytest.raises(
            StepOnEndedEpisode, match=r"^env 3 of worker 1 \(host .*\): its episode has ended"
        ) as caught:
            envs.step(np.zeros(4, np.int64))
        assert "env 1" not in str(caught.value)  # its number in the worker's own pool
        assert len(envs.recv()[1]) == 4


def test_seeds_of_later_resets_arrive_at_the_workers():
    with ClusterEnv(Ending, 2, 2, backend="serial", seed=1) as envs, envfleet.make(Ending, 4, backend="serial") as pool:
        for seed in (None, 7, 8, 7, [3, None, 5, 3]):
            expected = pool.reset(seed=1 if seed is None else seed)[0]
            obs = envs.reset(seed=seed)[0]
            given = [True, False, True, True] if isinstance(seed, list) else [True] * 4
            assert np.array_equal(obs[given], expected[given])
        assert obs[0] == obs[3] != obs[2]
        mask = np.array([False, False, True, False])
        kept = obs.copy()
        obs = envs.reset(seed=11, options={"reset_mask": mask})[0]
        assert np.array_equal(obs, np.where(mask[:, None], pool.reset(seed=11)[0], kept))


def test_an_info_with_too_many_numbers_in_lists_is_refused_in_words():
    with ClusterEnv(lambda: Ending(num_numbers=400_000), 1, 1, backend="serial") as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerFailed, match=r"more than \d{3},\d{3} entries in its lists.* NumPy array"):
            envs.step(np.zeros(1, np.int64))
    with ClusterEnv(lambda: Ending(num_numbers=200_000), 1, 1, backend="serial") as envs:
        envs.reset(seed=1)
        assert envs.step(np.zeros(1, np.int64))[4]["numbers"][0] == [1] * 200_000


class Endless(HandWorker):
    """Answers an order with a message that does not end: a chunk of one byte, again and again."""

    def __init__(self, address):
        self.num_chunks = 0
        super().__init__(address, answers=lambda hand, order: [])

    def send_chunk(self):
        frame_bytes = [8, 1 << 30] if self.num_chunks == 0 else None
        chunk = Chunk(number=self.num_chunks, attempt=0, frame_bytes=frame_bytes)
        self.num_chunks += 1
        self.send(encode(chunk, {"0": np.zeros(1, np.uint8)}))


def test_a_worker_cannot_hold_the_caller_with_chunks_that_do_not_end(monkeypatch):
    monkeypatch.setattr(head_socket, "MOST_EXTENSION", 4)
    launcher = ByHand(lambda address: [Endless(address)])
    with ClusterEnv("CartPole-v1", 1, 1, launcher=launcher) as envs:
        (worker,) = launcher.started
        is_over = threading.Event()

        def send_chunks():
            while not is_over.wait(0.05):
                worker.send_chunk()

        thread = threading.Thread(target=send_chunks)
        thread.start()
        try:
            with pytest.raises(ClusterTimeout, match=r"within 0.5 s \(\d+ s with large messages on their way\)"):
                envs.rollout(numpy_agents.discrete(num_actions=2), 3, timeout_s=0.5)
        finally:
            is_over.set()
            thread.join()
