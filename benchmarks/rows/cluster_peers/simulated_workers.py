"""Many workers in one process: they speak the protocol, and answer each order to collect with the same rollout at once.

`python simulated_workers.py HEAD_ADDRESS FIRST_WORKER NUM_WORKERS NUM_STEPS`. What is measured with them is the head:
real workers need a CPU each.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from typing import Any

import zmq  # noqa: TID253

import envfleet
from benchmarks.rows.cluster_envs import no_action
from envfleet.cluster.wire.codec import Decoder, encode
from envfleet.cluster.wire.messages import (
    PROTOCOL_VERSION,
    Collect,
    FromHead,
    Heartbeat,
    Join,
    Ready,
    Refused,
    RolloutReady,
    Stop,
    Welcome,
)
from envfleet.cluster.wire.sockets import open_dealer
from envfleet.cluster.wire.spaces import describe_space
from envfleet.cluster.worker.collecting.collector import Collector

SILENCE_S = 30.0


class Rollouts:
    """The arrays that every simulated worker sends: one real rollout."""

    def __init__(self, num_envs: int, num_steps: int) -> None:
        pool = envfleet.make("CartPole-v1", num_envs, autoreset_mode="same_step", num_workers=1, seed=0)
        policy = envfleet.FunctionPolicy(no_action)
        self.arrays, _ = Collector(pool, pool.reset()[0]).collect(policy, num_steps, [], lambda: None)
        obs, obs_arrays = describe_space(pool.single_observation_space, "observation_space")
        actions, action_arrays = describe_space(pool.single_action_space, "action_space")
        ready = Ready(observation_space=obs, action_space=actions, metadata={})
        self.ready_frames = encode(ready, {**obs_arrays, **action_arrays})
        pool.close()


class SimulatedWorker:
    """One connection to the head."""

    def __init__(self, context: Any, address: str, worker: int) -> None:
        self._name = secrets.token_bytes(16)
        self.dealer = open_dealer(context, address, None, SILENCE_S)
        self.dealer.connect(address)
        self._received = 0
        self._send(encode(Join(protocol=PROTOCOL_VERSION, worker=worker, host="simulated", pid=os.getpid())))

    def beat(self) -> None:
        self._send(encode(Heartbeat(received=self._received)))

    def react(self, message: Any, num_steps: int, rollouts: list[Rollouts]) -> None:
        if isinstance(message, Collect):
            if message.order != self._received + 1:
                return  # it came before
            self._received = message.order
            answer = RolloutReady(order=message.order, version=message.version, seconds=0.01)
            self._send(encode(answer, rollouts[0].arrays))
        elif isinstance(message, Welcome):
            if not rollouts:  # the first of this process: all workers have as many envs
                rollouts.append(Rollouts(message.plan.num_envs, num_steps))
            self._received = message.first_order - 1
            self._send(rollouts[0].ready_frames)
        elif isinstance(message, Stop | Refused):
            raise SystemExit(message.why)

    def _send(self, frames: list[Any]) -> None:
        self.dealer.send_multipart([self._name, *frames], copy=False)


def main() -> None:
    address, first, num_workers, num_steps = sys.argv[1], *map(int, sys.argv[2:5])
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * num_workers + 16)
    workers = {}
    poller = zmq.Poller()
    for worker in range(first, first + num_workers):
        simulated = SimulatedWorker(context, address, worker)
        workers[simulated.dealer] = simulated
        poller.register(simulated.dealer, zmq.POLLIN)
    decoder: Decoder[Any] = Decoder(FromHead)
    rollouts: list[Rollouts] = []
    next_beat_s = time.monotonic() + 1.0
    while True:
        for dealer, _ in poller.poll(250):
            message, _ = decoder.decode([frame.buffer for frame in dealer.recv_multipart(copy=False)])
            workers[dealer].react(message, num_steps, rollouts)
        if time.monotonic() > next_beat_s:
            next_beat_s = time.monotonic() + 1.0
            for simulated in workers.values():
                simulated.beat()


if __name__ == "__main__":
    main()
