"""A learner whose whole course its seed decides: all it collects and learns is hashed, update by update.

Run as `python -m tests.support.cluster.resumable_learner CHECKPOINT NUM_UPDATES SAVE_EVERY`: goes on from the
checkpoint if there is one. It prints a line before and after each update and each save(), and at the end how it came
out, as JSON. Without torch.
"""

import dataclasses
import hashlib
import json
import os
import sys

import numpy as np

from envfleet import ClusterEnv, FunctionPolicy

NUM_WORKERS, NUM_ENVS, NUM_STEPS, SEED = 2, 3, 7, 5
CLOCKS = {"episode_seconds"}  # of a rollout: no two runs agree on them


def digest(tree):
    """The same for two trees of arrays and plain values only if they are equal, bit for bit."""
    hashed = hashlib.blake2b(digest_size=12)
    _add(hashed, tree)
    return hashed.hexdigest()


def rollout_digest(rollout):
    return digest(
        {each.name: getattr(rollout, each.name) for each in dataclasses.fields(rollout) if each.name not in CLOCKS}
    )


def _add(hashed, tree):
    if isinstance(tree, dict):
        for key in sorted(tree):
            hashed.update(str(key).encode())
            _add(hashed, tree[key])
    elif isinstance(tree, list | tuple):
        for part in tree:
            _add(hashed, part)
    elif hasattr(tree, "dtype"):
        array = np.asarray(tree.detach() if hasattr(tree, "detach") else tree)
        hashed.update(f"{array.dtype}{array.shape}".encode())
        hashed.update(np.ascontiguousarray(array).tobytes())
    else:
        hashed.update(repr(tree).encode())


def act(weights, obs, action_mask=None):
    """Draws from the global generator of NumPy, which the worker has seeded."""
    logits = obs @ weights["w"]
    if action_mask is not None:
        logits = np.where(action_mask, logits, -np.inf)
    actions = (logits + np.random.gumbel(size=logits.shape)).argmax(-1)
    return actions, log_softmax(logits)[np.arange(len(obs)), actions].astype(np.float32)


def log_prob(weights, obs, actions, action_mask=None):
    return log_softmax(obs @ weights["w"])[np.arange(len(obs)), actions].astype(np.float32)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class NumpyLearner:
    """A linear policy that moves at random, as far as its rollouts say."""

    def __init__(self):
        self.asks = {}  # further arguments of rollout()
        self.weights = {"w": np.zeros((4, 2), np.float32)}
        self.agent = FunctionPolicy(act, log_prob, weights=self.weights)
        self.random = np.random.default_rng(SEED)
        self.digests = []

    def update(self, cluster):
        rollout = cluster.rollout(self.agent, NUM_STEPS, **self.asks)
        divergences = [each.divergence for each in cluster.stats().workers]
        self.digests.append(digest([rollout_digest(rollout), divergences]))
        self.learn(rollout, signal_of(rollout))

    def learn(self, rollout, signal):
        self.weights["w"] += np.float32(signal) * self.random.normal(size=(4, 2)).astype(np.float32)

    def state(self):
        """What it adds to a checkpoint."""
        return {"weights": self.weights, "random": self.random.bit_generator.state, "digests": self.digests}

    def restore(self, state):
        self.weights.update(state["weights"])
        self.random.bit_generator.state = state["random"]
        self.digests = list(state["digests"])

    def outcome(self):
        return {"digests": self.digests, "weights": digest(self.weights)}


def signal_of(rollout):
    """A number that depends on all of the rollout."""
    return float(
        np.mean(rollout.obs)
        + np.mean(rollout.actions)
        + np.mean(rollout.log_probs if rollout.log_probs is not None else 0)
    )


def main(path, num_updates, save_every):
    learner = NumpyLearner()
    resume = path if os.path.exists(path) else None
    with ClusterEnv("CartPole-v1", NUM_WORKERS, NUM_ENVS, seed=SEED, resume=resume) as cluster:
        num_resumes = 0
        if cluster.resumed is not None:
            learner.restore(cluster.resumed.extra["learner"])
            num_resumes = cluster.resumed.extra["num_resumes"] + 1
        while len(learner.digests) < num_updates:
            print("updating", flush=True)
            learner.update(cluster)
            if len(learner.digests) % save_every == 0:
                print("saving", flush=True)
                cluster.save(path, extra={"learner": learner.state(), "num_resumes": num_resumes})
        stats = cluster.stats()
        outcome = {"num_steps": stats.num_steps, "version": stats.version}  # metrics: which worker was first is chance
        print(json.dumps({"num_resumes": num_resumes, "outcome": {**learner.outcome(), **outcome}}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
