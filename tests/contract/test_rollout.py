"""Rollout.to_torch(): each array in one transfer, on any device, through page-locked memory where that is asked for."""

import dataclasses

import numpy as np
import pytest

from envfleet.contract.rollout import Rollout

torch = pytest.importorskip("torch")

T, N, F = 5, 3, 2


def made(is_writable=True):
    """A rollout with all that one can have, and the number of its arrays."""
    random = np.random.default_rng(0)
    shapes = {name: (T, N) for name in ("log_probs", "rewards", "final_values")}
    shapes |= {name: (F,) for name in ("episode_returns", "episode_seconds")} | {"next_values": (N,)}
    floats = {name: random.normal(size=shape) for name, shape in shapes.items()}
    ints = {name: np.arange(F) for name in ("final_steps", "final_envs", "episode_lengths")}
    ints |= {name: np.arange(N) for name in ("env_ids", "parts")}
    ints |= {name: np.arange(1) for name in ("workers", "versions", "lags")}
    rollout = Rollout(
        obs={"image": random.integers(256, size=(T, N, 2, 2), dtype=np.uint8), "pair": (random.normal(size=(T, N)),)},
        actions=random.integers(2, size=(N, T)).T,  # not contiguous
        extras={"values": random.normal(size=(T, N)).astype(np.float32)},
        terminations=random.random((T, N)) < 0.5,
        truncations=random.random((T, N)) < 0.5,
        next_obs={"image": np.zeros((N, 2, 2), np.uint8), "pair": (np.zeros(N),)},
        final_obs={"image": np.zeros((F, 2, 2), np.uint8), "pair": (np.zeros(F),)},
        states={"h": np.zeros((N, 1, 4), np.float32)},
        infos={"key": np.zeros((T, N)), "words": [(0, 1, "text")]},
        action_masks=np.ones((T, N, 2), np.bool_),
        **floats,
        **ints,
    )
    found = arrays(rollout)
    for array in found.values():
        array.flags.writeable = is_writable
    return rollout, found


def arrays(value, name=""):
    """All arrays or tensors, by where they are."""
    if isinstance(value, Rollout):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {path: leaf for key, part in value.items() for path, leaf in arrays(part, f"{name}.{key}").items()}
    return {name: value} if hasattr(value, "dtype") else {}


def require_same(tensors, expected):
    found = arrays(tensors)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        assert found[name].cpu().numpy().dtype == array.dtype, name
        np.testing.assert_array_equal(found[name].cpu().numpy(), array, name)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
@pytest.mark.parametrize("is_writable", [True, False])
def test_on_the_cpu(device, is_writable):
    rollout, expected = made(is_writable)
    tensors = rollout.to_torch(device)
    require_same(tensors, expected)
    assert tensors.infos["words"] == [(0, 1, "text")] and tensors.changes is None
    shares = tensors.extras["values"].data_ptr() == rollout.extras["values"].ctypes.data
    assert shares is is_writable


@pytest.mark.parametrize("is_writable", [True, False])
def test_one_transfer_for_each_array(fake_gpu, is_writable):
    rollout, expected = made(is_writable)
    with fake_gpu.counted_copies() as copies:
        tensors = rollout.to_torch(fake_gpu.NAME)
    assert (copies.to_device, copies.to_host) == (len(expected), 0)
    assert {each.device for each in arrays(tensors).values()} == {fake_gpu.DEVICE}
    require_same(tensors, expected)


def test_on_meta():
    rollout, expected = made()
    found = arrays(rollout.to_torch("meta"))
    assert {name: tuple(each.shape) for name, each in found.items()} == {n: each.shape for n, each in expected.items()}
    assert {each.device.type for each in found.values()} == {"meta"}


def test_pinned(fake_gpu, monkeypatch):
    """No device here has page-locked memory: torch.empty() only notes that it was asked for some."""
    rollout, expected = made(is_writable=False)
    empty, to, num_pinned, waits = torch.empty, torch.Tensor.to, [], []

    def noting_empty(*args, pin_memory=False, **kwargs):
        num_pinned.append(pin_memory)
        return empty(*args, **kwargs)

    def noting_to(self, *args, **kwargs):
        waits.append(not kwargs.get("non_blocking", False))
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch, "empty", noting_empty)
    monkeypatch.setattr(torch.Tensor, "to", noting_to)
    with fake_gpu.counted_copies() as copies:
        tensors = rollout.to_torch(fake_gpu.NAME, pin_memory=True)
    assert num_pinned == [True] * len(expected) and waits == [False] * len(expected)
    assert copies.to_device == len(expected)
    monkeypatch.undo()
    require_same(tensors, expected)


def test_pinning_changes_nothing_without_an_accelerator(monkeypatch):
    rollout, expected = made()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # a device of another test may be there
    require_same(rollout.to_torch(pin_memory=True), expected)
