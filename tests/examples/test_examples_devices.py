"""`--device` of every example. There is no GPU here: see tests.support.fake_gpu."""

import sys

import pytest

from tests.support.scripts import EXAMPLES
from tests.support.short_examples import SHORT_FLAGS, run_example

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch", "rich.live", "rich.progress")


@pytest.mark.parametrize("name", SHORT_FLAGS)
def test_device_and_checkpoint(fake_gpu, monkeypatch, tmp_path, name):
    """What was saved on a device goes on there."""
    monkeypatch.chdir(tmp_path)
    flags = ["--device", fake_gpu.NAME, "--checkpoint", "saved", "--resume", "auto"]
    with fake_gpu.counted_copies() as copies:
        assert run_example(monkeypatch, name, *flags) == 0
    assert copies.to_device > 0 and copies.to_host > 0
    if name != "curriculum":  # whose Python envs take long to start
        assert run_example(monkeypatch, name, *flags, "--total-steps", "80" if name == "sac" else "480") == 0


def test_local(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    flags = f"--device {fake_gpu.NAME} --num-envs 3 --total-steps 90 --num-rollout-steps 16 --output-dir {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["ppo_local.py", *flags.split()])
    import ppo_local

    monkeypatch.setattr(ppo_local, "draw_learning_curve", lambda *_: None)  # Matplotlib keeps files open
    with fake_gpu.counted_copies() as copies:
        assert ppo_local.main() == 0
    assert copies.to_device > 0
