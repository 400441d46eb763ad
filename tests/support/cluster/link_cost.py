"""How many bytes weights and rollouts cost on a slow link: what is measured, for a test and for a benchmark.

Counted is the payload of the TCP segments that the link delivers in the direction of the weights or rollout, from the
call of rollout() until the link is quiet: the arrays, our messages, ZeroMQ's frames, encryption, heartbeats, and all
that is sent again, by us or by TCP. Headers of TCP and IP are not counted: they are 3.6 % of a packet of 1,500 bytes.
"""

import contextlib
import time
from dataclasses import dataclass

import envfleet
from envfleet.testing.cluster_arguments import cluster_arguments
from tests.support.cluster.tun_wire import Link, TunWire
from tests.support.envs.bulky_envs import BulkyAgent, BulkyEnv

NUM_ENVS, NUM_STEPS = 2, 10
SMALL_BYTES = 1024
QUIET_BYTES, QUIET_S = 20_000, 1.0  # heartbeats are less than this
DELAY_S = 0.005  # of the link, in each direction


@dataclass(frozen=True)
class Cost:
    """What one payload cost."""

    payload_bytes: int  # of the arrays
    tcp_bytes: int
    num_dropped: int  # packets, by the full queue of the link
    seconds: float  # until rollout() returned

    @property
    def ratio(self):
        return self.tcp_bytes / self.payload_bytes


def cost_of_weights(num_bytes, rate_bps, timeout_s=300.0):
    """New weights of `num_bytes` for a worker that has older ones."""
    with _cluster(num_bytes, SMALL_BYTES, timeout_s) as (wire, envs, agent):
        agent.weights = {name: array + 1 for name, array in agent.weights.items()}
        before = _slow_down(wire, rate_bps).to_workers
        begin_s = time.monotonic()
        envs.rollout(agent, NUM_STEPS)
        seconds = time.monotonic() - begin_s
        after = _quiet(wire).to_workers
        payload_bytes = sum(array.nbytes for array in agent.weights.values())
        return Cost(payload_bytes, after.tcp_bytes - before.tcp_bytes, after.num_dropped - before.num_dropped, seconds)


def cost_of_rollout(num_bytes, rate_bps, timeout_s=300.0):
    """A rollout with about `num_bytes` of observations, by a worker that has the newest weights."""
    with _cluster(SMALL_BYTES, num_bytes, timeout_s) as (wire, envs, agent):
        before = _slow_down(wire, rate_bps).to_head
        begin_s = time.monotonic()
        rollout = envs.rollout(agent, NUM_STEPS)
        seconds = time.monotonic() - begin_s
        after = _quiet(wire).to_head
        payload_bytes = sum(array.nbytes for array in (rollout.obs, rollout.next_obs, rollout.final_obs))
        return Cost(payload_bytes, after.tcp_bytes - before.tcp_bytes, after.num_dropped - before.num_dropped, seconds)


@contextlib.contextmanager
def _cluster(weight_bytes, rollout_bytes, timeout_s):
    """A worker that has code and weights of the policy; the link is still quick."""
    obs_bytes = rollout_bytes // (NUM_ENVS * (NUM_STEPS + 1)) // 8 * 8  # also of those that follow the last step
    settings = {"backend": "serial", "env_kwargs": {"obs_bytes": obs_bytes}, "timeout_s": timeout_s}
    with (
        TunWire() as wire,
        envfleet.ClusterEnv(BulkyEnv, 1, NUM_ENVS, launcher=wire.launcher(), **cluster_arguments(settings)) as envs,
    ):
        agent = BulkyAgent(weight_bytes)
        envs.rollout(agent, 1)
        yield wire, envs, agent


def _slow_down(wire, rate_bps):
    link = Link(rate_bps=rate_bps, delay_s=DELAY_S)
    wire.set(to_workers=link, to_head=link)
    return _quiet(wire)


def _quiet(wire):
    """What was counted when nothing came for a second."""
    before = wire.counts()
    while True:
        time.sleep(QUIET_S)
        counts = wire.counts()
        if counts.tcp_bytes - before.tcp_bytes < QUIET_BYTES:
            return counts
        before = counts
