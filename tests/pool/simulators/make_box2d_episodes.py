"""Play the episodes of box2d_policies.TRIALS with Gymnasium's envs, and write their returns and lengths.

python -m tests.pool.simulators.make_box2d_episodes     # some minutes; writes golden/box2d_episodes.npz
"""

from multiprocessing import Pool
from pathlib import Path

import gymnasium
import numpy as np

from tests.support.box2d_policies import FIRST_SEED, TRIALS

RESULT = Path(__file__).parent / "golden" / "box2d_episodes.npz"


def play(trial):
    env = gymnasium.make(trial.env_id, max_episode_steps=trial.max_episode_steps, **trial.env_kwargs)
    returns, lengths = [], []
    for seed in range(FIRST_SEED, FIRST_SEED + trial.num_episodes):
        obs, _ = env.reset(seed=seed)
        policy = trial.make_policy(seed)
        total, length, has_ended = 0.0, 0, False
        while not has_ended:
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            total += reward
            length += 1
            has_ended = terminated or truncated
        returns.append(total)
        lengths.append(length)
    env.close()
    return {f"{trial}/returns": np.array(returns, np.float32), f"{trial}/lengths": np.array(lengths, np.int32)}


if __name__ == "__main__":
    with Pool(2) as workers:
        columns = {}
        for each in workers.imap(play, TRIALS, chunksize=1):
            columns |= each
            print(", ".join(f"{name}: mean {values.mean():.2f}" for name, values in each.items()), flush=True)
    np.savez_compressed(RESULT, **columns)
