"""PPO on CartPole-v1 with JAX: environments, policy and learning are one compiled program, a lax.scan over updates.

    python examples/ppo_jax.py
    python examples/ppo_jax.py --env-id Acrobot-v1 --total-steps 300000

Only JAX is needed (pip install "envfleet[jax]"). Python resets the pool and starts the program; it comes back when
the training is over; so there are no checkpoints, and no launcher: the envs are threads of this process.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import envfleet

Params = dict[str, list[dict[str, jax.Array]]]  # layers of "policy" and "value"
StepFn = Callable[[Any, jax.Array], Any]  # handle, actions -> handle, (obs, rewards, terminations, truncations, infos)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen; each field is a command-line flag."""

    env_id: str = "CartPole-v1"  # with Box observations and Discrete actions
    num_envs: int = 16
    seed: int = 1  # of environments, weights, actions and minibatches
    total_steps: int = 300_000  # as many updates as fit in
    num_rollout_steps: int = 128  # steps of each environment between two updates
    num_epochs: int = 10  # passes over each rollout
    num_minibatches: int = 4
    learning_rate: float = 1e-3  # of Adam at the start; falls to 0 in a line
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    value_weight: float = 0.5
    max_grad_norm: float = 0.5
    num_hidden: int = 64  # units in each of the two hidden layers

    @property
    def num_updates(self) -> int:
        return max(1, self.total_steps // (self.num_envs * self.num_rollout_steps))


# -- networks --


def new_params(key: jax.Array, obs_size: int, num_actions: int, num_hidden: int) -> Params:
    """The policy and the value function share no weights. A last layer near zero: all actions are about as likely."""
    keys = jax.random.split(key, 6)

    def layers(keys: jax.Array, num_outputs: int, last_gain: float) -> list[dict[str, jax.Array]]:
        sizes = [obs_size, num_hidden, num_hidden, num_outputs]
        gains = [2**0.5, 2**0.5, last_gain]
        return [
            {"w": jax.nn.initializers.orthogonal(gain)(key, (num_in, num_out)), "b": jnp.zeros(num_out)}
            for key, num_in, num_out, gain in zip(keys, sizes[:-1], sizes[1:], gains, strict=True)
        ]

    return {"policy": layers(keys[:3], num_actions, 0.01), "value": layers(keys[3:], 1, 1.0)}


def mlp(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def log_probs_of(params: Params, obs: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(mlp(params["policy"], obs))


def values_of(params: Params, obs: jax.Array) -> jax.Array:
    return mlp(params["value"], obs)[..., 0]


def chosen(log_probs: jax.Array, actions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_probs, actions[..., None], axis=-1)[..., 0]


# -- Adam --


class Adam(NamedTuple):
    """Moving averages of the gradients and of their squares."""

    mean: Params
    square: Params
    count: jax.Array


def new_adam(params: Params) -> Adam:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Adam(zeros, zeros, jnp.zeros((), jnp.int32))


def adam_update(adam: Adam, grads: Params, params: Params, rate: jax.Array, max_norm: float) -> tuple[Params, Adam]:
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(each)) for each in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda grad: grad * jnp.minimum(1.0, max_norm / (norm + 1e-8)), grads)
    count = adam.count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, adam.mean, grads)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, adam.square, grads)
    by_mean, by_square = 1 - 0.9**count, 1 - 0.999**count
    params = jax.tree.map(
        lambda p, m, s: p - rate * (m / by_mean) / (jnp.sqrt(s / by_square) + 1e-5), params, mean, square
    )
    return params, Adam(mean, square, count)


# -- PPO --


class Learner(NamedTuple):
    """All that changes in a training: the carry of the scan over updates."""

    params: Params
    adam: Adam
    key: jax.Array
    handle: Any  # of the pool
    obs: jax.Array  # [N, *obs_shape]
    ended: jax.Array  # [N] the next step only resets this env
    returns: jax.Array  # [N] of the running episodes


class Steps(NamedTuple):
    """A rollout: [T, N] of each."""

    obs: jax.Array
    actions: jax.Array
    rewards: jax.Array
    terminated: jax.Array
    ended: jax.Array  # terminated or truncated
    is_real: jax.Array  # False: this step only reset the env, and nothing true can be learned from it
    returns: jax.Array  # of the episode that ended here, else 0


class Progress(NamedTuple):
    """Of one update."""

    num_steps: jax.Array  # without those that only reset an env
    num_episodes: jax.Array  # that ended
    return_sum: jax.Array  # of these


def new_learner(settings: Settings, handle: Any, obs: jax.Array, num_actions: int) -> Learner:
    key, params_key = jax.random.split(jax.random.key(settings.seed))
    params = new_params(params_key, obs.shape[-1], num_actions, settings.num_hidden)
    zeros = jnp.zeros(settings.num_envs)
    return Learner(params, new_adam(params), key, jnp.asarray(handle), jnp.asarray(obs), zeros > 0, zeros)


def collect(step: StepFn, settings: Settings, learner: Learner) -> tuple[Learner, Steps]:
    def one_step(learner: Learner, key: jax.Array) -> tuple[Learner, Steps]:
        actions = jax.random.categorical(key, mlp(learner.params["policy"], learner.obs))
        handle, (obs, rewards, terminated, truncated, _) = step(learner.handle, actions)
        ended = terminated | truncated
        returns = learner.returns + rewards
        steps = Steps(learner.obs, actions, rewards, terminated, ended, ~learner.ended, jnp.where(ended, returns, 0.0))
        learner = learner._replace(handle=handle, obs=obs, ended=ended, returns=jnp.where(ended, 0.0, returns))
        return learner, steps

    key, steps_key = jax.random.split(learner.key)
    return lax.scan(one_step, learner._replace(key=key), jax.random.split(steps_key, settings.num_rollout_steps))


def advantages_of(steps: Steps, values: jax.Array, settings: Settings) -> jax.Array:
    """Generalized advantage estimates; `values` is [T + 1, N].

    After a truncation the next value counts, and is at hand: the next row still holds the last observation.
    """

    def one_step(later: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
        reward, terminated, ended, value, next_value = row
        error = reward + settings.discount * jnp.where(terminated, 0.0, next_value) - value
        later = error + settings.discount * settings.gae_lambda * jnp.where(ended, 0.0, later)
        return later, later

    rows = (steps.rewards, steps.terminated, steps.ended, values[:-1], values[1:])
    return lax.scan(one_step, jnp.zeros_like(values[0]), rows, reverse=True)[1]


def loss_of(params: Params, batch: Any, settings: Settings) -> jax.Array:
    obs, actions, old_log_probs, advantages, targets, weights = batch
    ratio = jnp.exp(chosen(log_probs_of(params, obs), actions) - old_log_probs)
    clipped = jnp.clip(ratio, 1 - settings.clip_range, 1 + settings.clip_range)
    policy_loss = -jnp.minimum(ratio * advantages, clipped * advantages)
    value_loss = jnp.square(values_of(params, obs) - targets)
    return jnp.sum(weights * (policy_loss + settings.value_weight * value_loss)) / jnp.maximum(weights.sum(), 1.0)


def learn(settings: Settings, learner: Learner, steps: Steps, rate: jax.Array) -> Learner:
    values = values_of(learner.params, jnp.concatenate([steps.obs, learner.obs[None]]))
    advantages = advantages_of(steps, values, settings)
    weights = steps.is_real.astype(jnp.float32)
    mean = jnp.sum(weights * advantages) / weights.sum()
    deviation = jnp.sqrt(jnp.sum(weights * jnp.square(advantages - mean)) / weights.sum())
    log_probs = chosen(log_probs_of(learner.params, steps.obs), steps.actions)
    normal = (advantages - mean) / (deviation + 1e-8)
    batch = (steps.obs, steps.actions, log_probs, normal, advantages + values[:-1], weights)
    batch = jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), batch)  # [T * N, ...]

    def one_minibatch(carry: tuple[Params, Adam], rows: jax.Array) -> tuple[tuple[Params, Adam], None]:
        params, adam = carry
        grads = jax.grad(loss_of)(params, jax.tree.map(lambda each: each[rows], batch), settings)
        return adam_update(adam, grads, params, rate, settings.max_grad_norm), None

    def one_epoch(carry: tuple[Params, Adam], key: jax.Array) -> tuple[tuple[Params, Adam], None]:
        rows = jax.random.permutation(key, weights.size).reshape(settings.num_minibatches, -1)
        return lax.scan(one_minibatch, carry, rows)

    key, epochs_key = jax.random.split(learner.key)
    epoch_keys = jax.random.split(epochs_key, settings.num_epochs)
    (params, adam), _ = lax.scan(one_epoch, (learner.params, learner.adam), epoch_keys)
    return learner._replace(params=params, adam=adam, key=key)


@partial(jax.jit, static_argnums=(0, 1))
def train(step: StepFn, settings: Settings, learner: Learner) -> tuple[Learner, Progress]:
    """All updates, in one compiled program."""

    def one_update(learner: Learner, update: jax.Array) -> tuple[Learner, Progress]:
        learner, steps = collect(step, settings, learner)
        rate = settings.learning_rate * (1 - update / settings.num_updates)
        learner = learn(settings, learner, steps, rate)
        return learner, Progress(steps.is_real.sum(), steps.ended.sum(), steps.returns.sum())

    return lax.scan(one_update, learner, jnp.arange(settings.num_updates))


def settings_from_command_line() -> Settings:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for each in fields(Settings):
        default = getattr(Settings, each.name)
        parser.add_argument("--" + each.name.replace("_", "-"), type=type(default), default=default, help="%(default)s")
    return Settings(**vars(parser.parse_args()))


def main() -> int:
    settings = settings_from_command_line()
    with envfleet.make(settings.env_id, settings.num_envs, backend="native", seed=settings.seed) as pool:
        obs, _ = pool.reset()
        handle, _, _, step = pool.xla()
        learner = new_learner(settings, handle, obs, int(pool.single_action_space.n))
        print("compiling ...")
        program = train.lower(step, settings, learner).compile()
        start_s = time.perf_counter()
        learner, progress = jax.block_until_ready(program(learner))
        duration_s = time.perf_counter() - start_s

    num_steps = 0
    for part in zip(*(np.array_split(each, min(10, settings.num_updates)) for each in progress), strict=True):
        num_part_steps, num_episodes, return_sum = (each.sum() for each in part)
        num_steps += int(num_part_steps)
        print(f"{num_steps:>9,} steps: {num_episodes:>5} episodes, mean return {return_sum / max(num_episodes, 1):.1f}")
    print(f"{settings.env_id}: {num_steps:,} steps in {duration_s:.1f} s ({num_steps / duration_s:,.0f} steps/s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
