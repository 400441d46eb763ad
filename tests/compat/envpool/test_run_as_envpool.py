"""Scripts that say `import envpool` run unmodified."""

import os
import subprocess
import sys

import pytest

from envfleet.compat.envpool.real_envpool import is_installed
from envfleet.compat.run_as_envpool import main
from tests.support.scripts import ROOT, script_environment

CLEANRL = ROOT / "build" / "cleanrl" / "cleanrl"
OLD_GYM = ROOT / "build" / "old-gym"

SCRIPT = """
import sys
import envpool
import envpool.registration
from envpool.python.protocol import EnvPool
from envpool.registration import make_gym
from envpool.classic_control import CartPoleEnvSpec, CartPoleGymnasiumEnvPool
import envpool.classic_control.registration
import numpy as np
import neighbour

pool = envpool.make("CartPole-v1", env_type="gym", num_envs=2)
assert isinstance(pool, EnvPool) and type(pool).__module__.startswith("envfleet."), type(pool)
assert pool.reset()[0].shape == (2, 4)
assert __name__ == "__main__" and sys.argv[1:] == ["--steps", "3"]
low = CartPoleGymnasiumEnvPool(CartPoleEnvSpec(CartPoleEnvSpec.gen_config(num_envs=3)))
assert low.step(np.zeros(3, np.int32))[-1]["elapsed_step"].tolist() == [0, 0, 0]
assert envpool.mujoco.gym.GymAntEnvSpec is not None
print("done", neighbour.NAME)
"""


def run(*arguments, cwd, timeout_s=100, **variables):
    return subprocess.run(
        [sys.executable, "-m", "envfleet.compat.run_as_envpool", *map(str, arguments)],
        cwd=cwd,
        env=script_environment(**variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_a_script_runs_with_our_module_under_envpools_name(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    done = run(tmp_path / "script.py", "--steps", "3", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done neighbour\n"
    done = run("-m", "script", "--steps", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["nothing.py"], ["-m"]])
def test_it_says_what_it_wants(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: python -m envfleet.compat.run_as_envpool" in capsys.readouterr().err


@pytest.mark.skipif(not is_installed(), reason="needs envpool")
def test_the_real_envpool_runs_the_other_tasks_under_its_own_name(tmp_path):
    script = """
import sys, envpool
for _ in range(2):
    pool = envpool.make("WalkerWalk-v1", env_type="gymnasium", num_envs=2)
    assert not type(pool).__module__.startswith("envfleet."), type(pool)
    assert pool.reset()[1]["env_id"].tolist() == [0, 1]
assert sys.modules["envpool"] is envpool and envpool.__name__ == "envfleet.compat.envpool"
assert "WalkerWalk-v1" in envpool.list_all_envs()
from envpool.atari import AtariEnvSpec
assert AtariEnvSpec.__module__.startswith("envfleet.")
"""
    (tmp_path / "script.py").write_text(script)
    done = run(tmp_path / "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not CLEANRL.exists(), reason="needs CleanRL's scripts: make build/cleanrl/ready")
@pytest.mark.skipif(not OLD_GYM.exists(), reason="needs the gym that CleanRL uses: make build/old-gym/ready")
def test_cleanrls_ppo_for_envpool_runs_as_it_is(tmp_path):
    for module in ("ale_py", "torch", "tensorboard"):
        pytest.importorskip(module)
    python_path = os.pathsep.join([script_environment()["PYTHONPATH"], str(OLD_GYM)])
    settings = {"env-id": "Breakout-v5", "num-envs": 2, "num-steps": 16, "total-timesteps": 64}
    settings |= {"update-epochs": 1, "num-minibatches": 1}
    arguments = [text for name, value in settings.items() for text in (f"--{name}", value)]
    done = run(CLEANRL / "ppo_atari_envpool.py", *arguments, cwd=tmp_path, PYTHONPATH=python_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SPS:") == 2, done.stdout  # an update each 2 * 16 steps
    assert list(tmp_path.glob("runs/Breakout-v5__ppo_atari_envpool__1__*/events*"))
