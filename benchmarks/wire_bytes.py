"""How many bytes does a step of a stacked-image env take on the wire: plain, frames sent once, and compressed?

    python -m benchmarks.wire_bytes --game seaquest

With ale-py the frames are a game's, played at random by 16 envs, 84 x 84 and stacked by 4; without it they are drawn
here: a still background, two bats and a ball. Times are of one core, best of 5; the plain row has no work to do.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from envfleet.cluster.wire.codec import Decoder, encode
from envfleet.cluster.wire.messages import FromWorker, RolloutReady
from envfleet.cluster.wire.rollouts.stacks import pack, unpack

NUM_STEPS = 128
NUM_ENVS = 16
NUM_FRAMES = 4
SIDE = 84

Array = np.ndarray[Any, Any]


def game_stacks(game: str) -> Array:
    from ale_py import AtariVectorEnv

    envs = AtariVectorEnv(
        game, num_envs=NUM_ENVS, stack_num=NUM_FRAMES, img_height=SIDE, img_width=SIDE, noop_max=30, num_threads=1
    )
    obs, _ = envs.reset(seed=0)
    rng = np.random.default_rng(0)
    rows = []
    for step in range(200 + NUM_STEPS + 1):
        if step >= 200:  # past the serve
            rows.append(np.array(obs))
        obs, *_ = envs.step(rng.integers(0, envs.single_action_space.n, NUM_ENVS))
    envs.close()
    return np.stack(rows)


def drawn_stacks() -> Array:
    rng = np.random.default_rng(0)
    frames = np.full((NUM_STEPS + NUM_FRAMES, NUM_ENVS, SIDE, SIDE), 87, np.uint8)
    frames[:, :, :10] = frames[:, :, -8:] = 148
    bats, balls = (rng.integers(10, 60, (NUM_ENVS, 2)) for _ in range(2))
    for frame in frames:
        bats = np.clip(bats + rng.integers(-2, 3, bats.shape), 10, 66)
        balls = 10 + (balls - 10 + rng.integers(0, 3, balls.shape)) % 60
        for env in range(NUM_ENVS):
            frame[env, bats[env, 0] : bats[env, 0] + 8, 8:10] = 147
            frame[env, bats[env, 1] : bats[env, 1] + 8, 74:76] = 112
            frame[env, balls[env, 0] : balls[env, 0] + 2, balls[env, 1] : balls[env, 1] + 2] = 236
    stacks = [frames[offset : NUM_STEPS + 1 + offset] for offset in range(NUM_FRAMES)]
    return np.stack(stacks, axis=2)


def best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--game", default="pong", help="as ale-py names it")
    game = parser.parse_args().game
    try:
        stacks, source = game_stacks(game), f"real frames of {game}, by ale-py"
    except ModuleNotFoundError:
        stacks, source = drawn_stacks(), "drawn frames: ale-py is not installed"
    message = RolloutReady(order=1, version=1, seconds=1.0)
    decoder: Decoder[Any] = Decoder(FromWorker)
    packed = pack("obs", stacks)
    if packed is None:
        sys.exit("these stacks do not pack")
    print(f"{NUM_STEPS} steps of {NUM_ENVS} envs, observations {stacks.shape[2:]}; {source}")
    print(f"{'':16}{'bytes/step':>12}{'of plain':>10}{'send GB/s':>11}{'receive GB/s':>14}")
    plain_bytes = stacks.nbytes
    for label, stacked, compression in (
        ("plain", True, None),
        ("plain + zstd", True, "zstd"),
        ("packed", False, None),
        ("packed + zstd", False, "zstd"),
    ):

        def send(stacked: bool = stacked, compression: str | None = compression) -> list[Any]:
            arrays = {"obs": stacks} if stacked else pack("obs", stacks)
            return encode(message, arrays, compression)

        frames = send()
        out = np.empty_like(stacks)

        def receive(stacked: bool = stacked, frames: list[Any] = frames, out: Array = out) -> None:
            _, arrays = decoder.decode(frames)
            if stacked:
                np.copyto(out, arrays["obs"])
            else:
                unpack("obs", arrays, out)

        receive()
        if not np.array_equal(out, stacks):
            sys.exit(f"{label}: what arrived is not what was sent")
        num_bytes = sum(memoryview(frame).nbytes for frame in frames)
        rates = [f"{plain_bytes / best_s(work) / 1e9:.1f}" for work in (send, receive)]
        per_step = num_bytes / (NUM_STEPS * NUM_ENVS)
        send_rate = "-" if stacked and compression is None else rates[0]
        print(f"{label:16}{per_step:12.0f}{num_bytes / plain_bytes:10.1%}{send_rate:>11}{rates[1]:>14}")


if __name__ == "__main__":
    main()
