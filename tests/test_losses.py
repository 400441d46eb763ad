"""envfleet.losses against the twins of NumPy, on any device, with gradients where they belong."""

import subprocess
import sys

import numpy as np
import pytest
import torch  # noqa: TID253 - the losses are torch's
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import envfleet
from envfleet import UsageError, losses

FLOATS = st.floats(-8.0, 8.0, width=32)
DTYPES = [torch.float32, torch.float64]
NEAR = {torch.float32: {"rtol": 1e-4, "atol": 1e-3}, torch.float64: {"rtol": 1e-9, "atol": 1e-9}}
NAMES = ("rewards", "values", "next_values", "terminated", "truncated", "final_values")


@st.composite
def cases(draw):
    """Arguments of gae(), with the log-probs of two policies, in NumPy."""
    shape = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    floats = arrays(np.float64, shape, elements=FLOATS)
    bools = arrays(np.bool_, shape)
    case = {name: draw(bools if name.endswith("ated") else floats) for name in NAMES}
    case["next_values"] = case["next_values"][0]
    log_probs = arrays(np.float64, shape, elements=st.floats(-4.0, 0.0, width=32))
    return case, draw(log_probs), draw(log_probs)


def tensors(case, dtype):
    return {name: torch.from_numpy(array) if array.dtype == bool else torch.tensor(array, dtype=dtype) for name, array in case.items()}  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=50)
@given(case=cases(), gamma=st.floats(0.0, 1.0), lam=st.floats(0.0, 1.0))
def test_gae_is_its_twin(dtype, case, gamma, lam):
    found = losses.gae(**tensors(case[0], dtype), gamma=gamma, lam=lam)
    for tensor, array in zip(found, envfleet.gae(**case[0], gamma=gamma, lam=lam), strict=True):
        assert tensor.dtype == dtype
        np.testing.assert_allclose(tensor.numpy(), array, **NEAR[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=50)
@given(case=cases(), gamma=st.floats(0.0, 1.0), lam=st.floats(0.0, 1.0), max_rho=st.floats(0.5, 2.0))
def test_vtrace_is_its_twin(dtype, case, gamma, lam, max_rho):
    arguments, behaviour, target = case
    limits = {"gamma": gamma, "lam": lam, "max_rho": max_rho, "max_c": 0.9}
    log_probs = [torch.tensor(each, dtype=dtype) for each in (behaviour, target)]
    found = losses.vtrace(*log_probs, **tensors(arguments, dtype), **limits)
    for tensor, array in zip(found, envfleet.vtrace(behaviour, target, **arguments, **limits), strict=True):
        assert tensor.dtype == dtype
        np.testing.assert_allclose(tensor.numpy(), array, **NEAR[dtype])


def decoupled_twin(log_probs, start, behaviour, advantages, clip_range, max_weight):
    """The loss of each row by its definition, and its gradient: 0 where the clip holds the row."""
    weights, ratios = np.minimum(np.exp(start - behaviour), max_weight), np.exp(log_probs - start)
    objective = np.minimum(ratios * advantages, np.clip(ratios, 1 - clip_range, 1 + clip_range) * advantages)
    is_free = np.where(advantages > 0, ratios < 1 + clip_range, ratios > 1 - clip_range)
    loss, gradient = -(weights * objective).mean(), -weights * ratios * advantages * is_free / log_probs.size
    edges = np.minimum(abs(ratios - 1 - clip_range), abs(ratios - 1 + clip_range))
    return loss, gradient, (edges > 1e-4) & (advantages != 0)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=50)
@given(case=cases(), clip_range=st.floats(0.05, 0.5), max_weight=st.floats(0.5, 4.0))
def test_decoupled_ppo_is_its_twin_and_so_is_its_gradient(dtype, case, clip_range, max_weight):
    arguments, behaviour, start = case
    log_probs, advantages = start + arguments["values"] / 16, arguments["rewards"]
    given = [torch.tensor(each, dtype=dtype, requires_grad=True) for each in (log_probs, start, behaviour, advantages)]
    limits = {"clip_range": clip_range, "max_weight": max_weight}
    loss = losses.ppo_decoupled_loss(*given, **limits)
    loss.backward()
    expected, gradient, is_smooth = decoupled_twin(log_probs, start, behaviour, advantages, **limits)
    assert loss.dtype == dtype and loss.shape == ()
    np.testing.assert_allclose(loss.item(), expected, **NEAR[dtype])
    np.testing.assert_allclose(given[0].grad.numpy()[is_smooth], gradient[is_smooth], **NEAR[dtype])
    assert [each.grad for each in given[1:]] == [None] * 3


def test_on_data_of_the_newest_policy_the_loss_is_ppos():
    start, change, advantages = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 50)))
    ratios = (change / 4).exp()
    plain = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.2)).mean()
    torch.testing.assert_close(losses.ppo_decoupled_loss(start + change / 4, start, start, advantages), plain)


def test_a_stale_row_moves_the_learner_where_plain_ppo_would_not():
    """The worker's policy was four times less likely to act so: its clip is long passed."""
    behaviour, advantages = torch.zeros(1), torch.ones(1)
    log_probs = (behaviour + np.log(4.0)).requires_grad_()
    losses.ppo_decoupled_loss(log_probs, behaviour, behaviour, advantages).backward()  # start = behaviour: plain PPO
    assert log_probs.grad.tolist() == [0.0]
    log_probs.grad = None
    losses.ppo_decoupled_loss(log_probs, log_probs.detach(), behaviour, advantages).backward()
    assert log_probs.grad.tolist() == [-2.0], "the weight is truncated at 2"


def test_another_device_gives_the_same_numbers(fake_gpu):
    """Of the device that stands in for a GPU; it refuses tensors of the CPU."""
    generator = torch.Generator().manual_seed(0)
    case = {name: torch.randn(6, 3, generator=generator) for name in NAMES}
    case |= {name: torch.rand(6, 3, generator=generator) < 0.3 for name in ("terminated", "truncated")}
    case["next_values"] = case["next_values"][0]
    log_probs = [-torch.rand(6, 3, generator=generator) for _ in range(3)]
    there = {name: each.to(fake_gpu.NAME) for name, each in case.items()}
    log_probs_there = [each.to(fake_gpu.NAME) for each in log_probs]
    with fake_gpu.counted_copies() as copies:
        found = [
            *losses.gae(**there),
            *losses.vtrace(*log_probs_there[:2], **there),
            losses.ppo_decoupled_loss(*log_probs_there, there["values"]),
        ]
    assert (copies.to_device, copies.to_host) == (0, 0)
    assert {each.device for each in found} == {fake_gpu.DEVICE}
    expected = [
        *losses.gae(**case),
        *losses.vtrace(*log_probs[:2], **case),
        losses.ppo_decoupled_loss(*log_probs, case["values"]),
    ]
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


def test_tensors_of_two_devices_are_refused():
    case = {name: torch.zeros(4, 3) for name in NAMES} | {"next_values": torch.zeros(3)}
    for name in ("values", "next_values", "truncated"):
        wrong = case | {name: case[name].to("meta")}
        with pytest.raises(UsageError, match=rf"{name} must be on the device of rewards, cpu; it is on meta: rollout"):
            losses.gae(**wrong)
    with pytest.raises(UsageError, match="advantages must be on the device of log_probs, cpu; it is on meta"):
        losses.ppo_decoupled_loss(*[torch.zeros(3)] * 3, torch.zeros(3, device="meta"))


def test_any_device_without_a_look_at_the_numbers():
    """On `meta` there are no numbers: an operation that needs one on the host fails."""
    shape = (5, 3)
    case = {name: torch.zeros(shape, device="meta") for name in NAMES}
    case |= {name: torch.zeros(shape, device="meta", dtype=torch.bool) for name in ("terminated", "truncated")}
    case["next_values"] = torch.zeros(3, device="meta")
    log_probs = torch.zeros(shape, device="meta", requires_grad=True)
    found = [*losses.gae(**case), *losses.vtrace(log_probs, log_probs, **case)]
    assert [(each.device.type, each.shape) for each in found] == [("meta", shape)] * 4
    loss = losses.ppo_decoupled_loss(log_probs, log_probs, log_probs, found[0])
    loss.backward()
    assert (loss.device.type, loss.shape, log_probs.grad.device.type) == ("meta", (), "meta")


def test_no_gradient_flows_through_targets():
    case = tensors({name: np.ones((4, 2)) for name in NAMES}, torch.float32)
    case["next_values"] = torch.ones(2, requires_grad=True)
    case["values"].requires_grad_()
    assert not any(each.requires_grad for each in (*losses.gae(**case), *losses.vtrace(*[case["values"]] * 2, **case)))


def test_what_follows_an_end_does_not_matter():
    """Not even if it is infinite: nothing is multiplied by zero."""
    case = {name: np.ones((3, 1)) for name in NAMES}
    case |= {"next_values": np.ones(1), "terminated": np.array([[True], [False], [False]])}
    case |= {"truncated": np.zeros((3, 1), bool), "final_values": np.full((3, 1), np.nan)}
    case["rewards"][1] = np.inf
    assert losses.gae(**tensors(case, torch.float64)).advantages[0].item() == 0.0


def test_shapes_are_checked():
    case = tensors({name: np.ones((4, 2)) for name in NAMES}, torch.float32)
    with pytest.raises(UsageError, match=r"next_values must have shape \(2,\); got \(4, 2\)"):
        losses.gae(**case)
    case["next_values"] = torch.ones(2)
    with pytest.raises(UsageError, match=r"values must have the shape of rewards, \(4, 2\); got \(3,\)"):
        losses.gae(**{**case, "values": torch.ones(3)})
    with pytest.raises(UsageError, match="target_log_probs must have"):
        losses.vtrace(torch.ones(4, 2), torch.ones(4), **case)
    with pytest.raises(UsageError, match="T at least 1"):
        losses.gae(**{name: torch.ones(0, 2) for name in NAMES})
    with pytest.raises(UsageError, match="advantages must have the shape of log_probs"):
        losses.ppo_decoupled_loss(*[torch.ones(8)] * 3, torch.ones(8, 1))


def test_without_torch_the_extra_is_named():
    code = """if True:
        import sys
        sys.modules["torch"] = None
        import envfleet
        try:
            envfleet.losses
        except envfleet.MissingExtra as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "envfleet.losses needs PyTorch: pip install 'envfleet[torch]'\n", done.stderr
