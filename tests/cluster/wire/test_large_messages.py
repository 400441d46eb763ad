"""Weights, rollouts, orders and envs of many megabytes: in chunks, over ipc and tcp, slow links and cuts."""

import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

import envfleet
from envfleet.cluster.wire.messages import CHUNK_BYTES
from envfleet.cluster.wire.transfers import WINDOW
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.cluster.relay import Relay
from tests.support.envs.cluster_envs import Accounts, HeavyAgent, WideEnv
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

MB = 1 << 20
OBS_BYTES = 8 * WideEnv.NUM_NUMBERS
WINDOW_BYTES = WINDOW * CHUNK_BYTES


def cluster(num_workers=1, num_envs=2, **kwargs):
    settings = {"backend": "serial", "timeout_s": 60.0, "heartbeat_s": 0.2, **kwargs}
    return envfleet.ClusterEnv(WideEnv, num_workers, num_envs, **cluster_arguments(settings))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def behind_relay():
    """A relay, and what a cluster needs to be told so that its workers take it for the head."""
    port = free_port()
    with Relay(("127.0.0.1", port)) as relay:
        yield relay, {"address": f"tcp://127.0.0.1:{port}", "head_address": relay.address}


class WeighingEnv(WideEnv):
    def process_bytes(self):
        """Resident in its process."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_worker_keeps_its_weights_once():
    """Neither the message with the weights nor that with the code, in which they are too, stays in memory."""
    agent, num_bytes = HeavyAgent(0, 60 * MB), 60 * MB
    with envfleet.ClusterEnv(WeighingEnv, 1, 1, backend="serial") as envs:
        before = envs.call("process_bytes")[0]
        envs.rollout(agent, 1)
        wait_until(
            lambda: num_bytes < envs.call("process_bytes")[0] - before < 2 * num_bytes,
            lambda: f"{envs.call('process_bytes')[0] - before:,} bytes more are {num_bytes:,}",
        )


@pytest.mark.parametrize("address", [None, "tcp://127.0.0.1:0"])
def test_weights_and_rollouts_of_many_megabytes(address):
    accounts = Accounts()
    with cluster(num_workers=2, address=address) as envs:
        for action in range(3):
            agent = HeavyAgent(action, 20 * MB)
            rollout = envs.rollout(agent, 20)  # 2 envs, 21 observations: 21 MB of each worker
            accounts.add(rollout)
            assert (rollout.rewards == action).all(), "not with these weights"
            rest = rollout.obs[:, :, 1:]
            assert (rest == rest[:, :, :1]).all()
        stats = envs.stats()
    assert accounts.num_rows == 3 * 4 * 20
    for worker in stats.workers:
        assert worker.resent_bytes == 0
        assert worker.num_pulls == 3 and 60 * MB < worker.weight_bytes < 61 * MB
        assert 3 * 42 * OBS_BYTES < worker.rollout_bytes < 3 * 43 * OBS_BYTES
        assert worker.num_restarts == 0


def test_a_slow_link_carries_everything_once_and_deadlines_are_for_progress(behind_relay):
    """Weights that take 4 s and a rollout that takes 3 s, with 2 s for an answer."""
    relay, addresses = behind_relay
    accounts = Accounts()
    with cluster(**addresses, resend_s=0.5) as envs:
        agent = HeavyAgent(0, 1000)
        accounts.add(envs.rollout(agent, 1))
        relay.rate_bytes_s = 5 * MB
        before = dict(relay.num_bytes)
        agent.weights = HeavyAgent(1, 20 * MB).weights
        rollout = envs.rollout(agent, 14, timeout_s=2.0)
        accounts.add(rollout)
        assert (rollout.rewards == 1).all()
        carried = {name: relay.num_bytes[name] - before[name] for name in before}
        assert envs.stats().workers[0].resent_bytes == 0
        assert envs.stats().workers[0].num_pulls == 2
    assert carried["down"] < 1.05 * 20 * MB
    assert carried["up"] < 1.05 * 30 * OBS_BYTES


def test_connections_that_are_cut_in_the_middle_of_transfers(behind_relay):
    relay, addresses = behind_relay
    accounts = Accounts()
    num_cuts, is_over = 0, threading.Event()

    def cut_again_and_again():
        nonlocal num_cuts
        while not is_over.wait(0.7):
            relay.cut(0.05)
            num_cuts += 1

    with cluster(**addresses, resend_s=1.0) as envs:
        agent = HeavyAgent(0, 1000)
        accounts.add(envs.rollout(agent, 1))
        relay.rate_bytes_s = 20 * MB
        before = dict(relay.num_bytes)
        cutting = threading.Thread(target=cut_again_and_again)
        cutting.start()
        try:
            for action in (1, 2):
                agent.weights = HeavyAgent(action, 20 * MB).weights
                rollout = envs.rollout(agent, 20)
                accounts.add(rollout)
                assert (rollout.rewards == action).all()
        finally:
            is_over.set()
            cutting.join(10.0)
        worker = envs.stats().workers[0]
        carried = {name: relay.num_bytes[name] - before[name] for name in before}
    assert num_cuts > 3
    assert accounts.num_rows == 2 * 41 and worker.num_restarts == 0
    assert 0 < worker.resent_bytes <= 2 * num_cuts * WINDOW_BYTES
    assert carried["down"] < 1.05 * 2 * 20 * MB + num_cuts * WINDOW_BYTES
    assert carried["up"] < 1.05 * 2 * 42 * OBS_BYTES + num_cuts * WINDOW_BYTES


def test_a_rollout_is_sent_while_the_next_one_is_collected(tmp_path, behind_relay):
    """The worker's env hangs in the next rollout: that must not hold up the one before it."""
    relay, addresses = behind_relay
    with cluster(**addresses, num_envs=1, env_kwargs={"folder": str(tmp_path), "step_s": 0.1}) as envs:
        relay.rate_bytes_s = 10 * MB
        stream = envs.stream(HeavyAgent(0, 1000), 40)
        wait_until(lambda: relay.num_bytes["up"] > 2 * MB, "the first rollout is on its way")
        (tmp_path / "hold").touch()
        wait_until(lambda: list(tmp_path.glob("holding-*")), "the worker is in a step of the second one")
        assert relay.num_bytes["up"] < 20 * MB
        assert len(next(stream).rewards) == 40
        (tmp_path / "hold").unlink()
        assert len(next(stream).rewards) == 40


def test_small_messages_do_not_wait_for_a_large_one_to_be_sent(behind_relay):
    """A rollout is cancelled while the weights for it come: the worker hears of it before they are all there."""
    relay, addresses = behind_relay
    with cluster(**addresses) as envs:
        agent = HeavyAgent(0, 1000)
        envs.rollout(agent, 1)
        relay.rate_bytes_s = 4 * MB
        agent.weights = HeavyAgent(1, 40 * MB).weights
        before = relay.num_bytes["down"]
        stream = envs.stream(agent, 1)
        wait_until(lambda: relay.num_bytes["down"] - before > MB, "the weights are on their way")
        stream.close()
        envs.call("pid")
        assert relay.num_bytes["down"] - before < 20 * MB, "it has waited for the weights"


@pytest.mark.parametrize("address", [None, "tcp://127.0.0.1:0"])
def test_orders_of_many_megabytes(address):
    num_numbers = MB // 2
    with cluster(num_envs=1, address=address, env_kwargs={"num_action_numbers": num_numbers}) as envs:
        obs, _ = envs.reset()
        name = obs[0, 0]
        for step in range(1, 6):
            actions = np.zeros((1, num_numbers), np.float32)
            actions[0, :step] = 1.0
            obs, rewards, *_ = envs.step(actions)
            assert obs[0, 0] == name and (obs[0, 1:] == step).all() and rewards[0] == step
        assert envs.stats().workers[0].resent_bytes == 0


def test_an_env_of_many_megabytes():
    ballast = bytes(5 * MB)
    envs = envfleet.ClusterEnv(
        [lambda: WideEnv(ballast=ballast)] * 2, 2, 1, backend="serial", timing={"timeout_s": 60.0}
    )
    with envs:
        assert list(envs.call("num_ballast_bytes")) == [5 * MB] * 2
