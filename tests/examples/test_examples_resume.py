"""Examples that are stopped or killed go on from their checkpoint, where they can as if nothing had happened."""

import dataclasses
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import envfleet
from tests.support.scripts import EXAMPLES
from tests.support.waiting import descendants, is_running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]
FORKED_WITH = ("torch", "rich.live", "rich.progress")

# Small networks, because pyzmq keeps a thread and its files for good once it has sent an array of 64 kB.
SMALL = {"num_workers": 2, "num_envs_per_worker": 2, "num_hidden": 16}
PPO = {"num_rollout_steps": 16, "num_epochs": 2, "total_steps": 512, "num_eval_episodes": 0}
EXACT = {
    "ppo": PPO | {"sync": "aps"},
    "dqn": {"sync": "every_update", "total_steps": 240, "learning_starts": 128, "buffer_size": 150},
    "sac": {"sync": "every_update", "total_steps": 240, "learning_starts": 204, "buffer_size": 150},
}
# Of 8 updates, 15 and 60 rollouts; replay buffers have overwritten their oldest rows.
STOP_AFTER = {"ppo": 3, "dqn": 11, "sac": 55}
TIMES = {"elapsed_s", "duration_s", "collect_s"}  # never twice the same


def differences(one, other, place="extra"):
    """Where two values of a checkpoint differ."""
    if isinstance(one, dict):
        if set(one) != set(other):
            return [f"{place}: {sorted(one)}, {sorted(other)}"]
        parts = ((name, one[name], other[name]) for name in one if name not in TIMES)
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{place}: {len(one)}, {len(other)} items"]
        parts = ((number, *pair) for number, pair in enumerate(zip(one, other, strict=True)))
    else:
        same = np.array_equal(np.asarray(one), np.asarray(other), equal_nan=np.asarray(one).dtype.kind == "f")
        return [] if same else [f"{place}: {one}, {other}"]
    return [text for name, *pair in parts for text in differences(*pair, f"{place}.{name}")]


def same_checkpoints(one, other):
    one, other = (envfleet.load_checkpoint(path) for path in (one, other))
    assert (one.version, one.num_steps) == (other.version, other.num_steps)
    assert differences(dict(one.weights), dict(other.weights), "weights") == []
    assert differences(one.extra, other.extra) == []
    return True


def train(example, settings, on_update=lambda: None):
    if example.__name__ == "ppo":
        return example.train(settings, on_update=lambda _: on_update())
    return example.train(settings, SimpleNamespace(update=lambda *_: on_update()))


def told_after(num_updates):
    """A function that tells this process to stop when it is called for this number of times."""
    calls = []

    def on_update():
        calls.append(None)
        if len(calls) == num_updates:
            os.kill(os.getpid(), signal.SIGUSR1)

    return on_update


@pytest.mark.parametrize("example", EXACT, indirect=True)
def test_a_stopped_training_goes_on_bit_for_bit(example, tmp_path):
    settings = example.Settings(checkpoint=str(tmp_path / "whole"), **SMALL, **EXACT[example.__name__])
    whole = train(example, settings)
    assert whole.exit_code == 0

    settings = dataclasses.replace(settings, checkpoint=str(tmp_path / "parts"), resume="auto")
    stopped = train(example, settings, told_after(STOP_AFTER[example.__name__]))
    assert stopped.exit_code == 75 and 0 < stopped.num_steps < whole.num_steps
    resumed = train(example, settings)
    assert resumed.exit_code == 0
    assert (resumed.num_steps, resumed.episodes) == (whole.num_steps, whole.episodes)
    assert same_checkpoints(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("example", ["ppo"], indirect=True)
def test_a_training_that_has_finished_says_how_it_was(example, tmp_path):
    saved = {"checkpoint": str(tmp_path / "saved"), "resume": "auto"}
    settings = example.Settings(**saved, **SMALL, **PPO | {"total_steps": 64})
    first, again = train(example, settings), train(example, settings)
    assert (again.num_steps, again.num_updates, again.episodes) == (64, 1, first.episodes)
    assert again.exit_code == 0 and again.stats.version == first.stats.version


@pytest.mark.parametrize("example", ["dqn"], indirect=True)
def test_without_its_buffer_a_training_collects_first(example, tmp_path):
    few = EXACT["dqn"] | {"learning_starts": 64, "checkpoint_buffer": False, "checkpoint": str(tmp_path / "saved")}
    settings = example.Settings(resume="auto", **SMALL, **few)
    stopped = train(example, settings, told_after(10))
    assert stopped.num_updates > 0
    assert "buffer" not in envfleet.load_checkpoint(tmp_path / "saved").extra
    resumed = train(example, settings, told_after(3))  # 48 rows are in the buffer
    assert (resumed.num_updates, resumed.num_steps) == (stopped.num_updates, stopped.num_steps + 48)
    settings = dataclasses.replace(settings, checkpoint_buffer=True)
    cluster = SimpleNamespace(resumed=envfleet.load_checkpoint(tmp_path / "saved"))
    with pytest.raises(SystemExit, match="not of this example and these flags; it has no buffer"):
        example.Checkpoints(cluster, settings, buffer=None)


@pytest.mark.parametrize("example", ["impala"], indirect=True)
def test_a_stream_goes_on(example, tmp_path):
    few = {"total_steps": 640, "num_rollout_steps": 16, "checkpoint": str(tmp_path / "saved"), "resume": "auto"}
    settings = example.Settings(**SMALL, **few)
    stopped = train(example, settings, told_after(3))
    assert stopped.exit_code == 75 and stopped.num_steps == 3 * 32
    saved = envfleet.load_checkpoint(tmp_path / "saved")
    assert saved.extra["run"]["num_steps"] == stopped.num_steps
    resumed = train(example, settings)
    assert resumed.exit_code == 0 and resumed.num_steps == 640
    assert len(resumed.lags) == 20 and resumed.lags[:3] == stopped.lags
    assert resumed.num_versions == saved.version + 16  # the last update has a learning rate of 0, and no version


@pytest.mark.parametrize("example", ["curriculum"], indirect=True)
def test_goals_stay_where_they_were(example, tmp_path, monkeypatch):
    few = {"num_mean_episodes": 4, "success_rate": 0.01, "num_rollout_steps": 16, "last_distance": 2.5}
    saved = {"checkpoint": str(tmp_path / "saved"), "resume": "auto", "checkpoint_every_s": 0.0}
    settings = example.Settings(num_workers=2, num_envs_per_worker=4, **few, **saved)
    learn = example.learn

    def learn_until_goals_have_moved(*args):
        learn(*args)
        if progress and progress[0].moved:
            os.kill(os.getpid(), signal.SIGUSR1)

    progress = []
    monkeypatch.setattr(example, "learn", learn_until_goals_have_moved)
    made = example.Progress
    monkeypatch.setattr(example, "Progress", lambda distance: progress.append(made(distance)) or progress[-1])
    stopped = example.train(settings)
    assert stopped.exit_code == 75 and stopped.distance > 1.0
    monkeypatch.setattr(example, "learn", learn)
    progress.clear()
    resumed = example.train(settings)
    assert resumed.exit_code == 0 and resumed.num_steps > stopped.num_steps
    assert resumed.moved[: len(stopped.moved)] == stopped.moved and resumed.distance >= stopped.distance


# -- what is refused --


@pytest.mark.parametrize("example", ["ppo"], indirect=True)
def test_flags_that_do_not_go_together(example, monkeypatch):
    with pytest.raises(ValueError, match="--checkpoint, which is missing"):
        example.Settings(resume="auto")
    with pytest.raises(ValueError, match="there is no launcher 'slurn'"):
        example.Settings(launcher="slurn")
    with pytest.raises(ValueError, match="has no setting 'partion'; known: partition"):
        example.Settings(launcher="slurm", launcher_setting=("partion=cpu",))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(SystemExit, match="say --resume auto"):
        example.train(example.Settings(checkpoint="anywhere"))


@pytest.mark.parametrize("example", ["ppo"], indirect=True)
@pytest.mark.parametrize(
    ("flags", "launcher"),
    [
        ([], envfleet.Local()),
        (["--launcher", "slurm", "--launcher-setting", "partition=a"], envfleet.Slurm(partition="a")),
        (["--launcher", "ray", "--launcher-setting", "cpus_per_worker=2"], envfleet.Ray(cpus_per_worker=2)),
        (["--launcher", "kubernetes", "--launcher-setting", "image=x/y"], envfleet.Kubernetes("x/y")),
        (
            ["--launcher", "ssh", "--launcher-setting", "hosts=a", "--launcher-setting", "hosts=b"],
            envfleet.SSH(["a", "b"]),
        ),
    ],
    ids=["local", "slurm", "ray", "kubernetes", "ssh"],
)
def test_flags_make_the_launcher(example, monkeypatch, flags, launcher):
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags])
    settings = example.settings_from_command_line(example.Settings(), "")
    assert settings.where == {"launcher": launcher, "resume": None}


# -- killed --

# ppo.py; it saves after the fourth update, and is killed in the seventh, when its rollout has come.
KILLED = """
import os, signal, sys, time

import checkpoints
import ppo

save, gae, num_saves, num_rollouts = checkpoints.Checkpoints.save, ppo.losses.gae, [0], [0]

def save_at_4(self):
    num_saves[0] += 1
    if num_saves[0] == 4:
        save(self)

def killed_at_7(*args, **kwargs):
    num_rollouts[0] += 1
    if num_rollouts[0] == 7:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return gae(*args, **kwargs)

checkpoints.Checkpoints.save, ppo.losses.gae = save_at_4, killed_at_7
sys.exit(ppo.main())
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", ["ppo"], indirect=True)
def test_a_killed_ppo_goes_on_bit_for_bit(example, tmp_path):
    """A process as a user runs it is killed; its workers leave by themselves."""
    settings = example.Settings(checkpoint=str(tmp_path / "parts"), resume="auto", **SMALL, **EXACT["ppo"])
    flags = {
        name: value for name, value in vars(settings).items() if name in {**SMALL, **EXACT["ppo"], "checkpoint": 0}
    }
    words = [text for name, value in flags.items() for text in ("--" + name.replace("_", "-"), str(value))]
    command = [sys.executable, "-c", KILLED, *words, "--checkpoint-every-s", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with (tmp_path / "log").open("wb") as log:
        killed = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    started = set()
    try:
        wait_until((tmp_path / "parts").exists, "it has saved", 100.0)
        started.update(descendants(killed.pid))
        killed.wait(100)
    finally:
        killed.kill()
        killed.wait(20)
    assert killed.returncode == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert len(started) >= 2
    assert envfleet.load_checkpoint(tmp_path / "parts").extra["run"]["num_updates"] == 4

    assert train(example, settings).exit_code == 0
    train(example, dataclasses.replace(settings, checkpoint=str(tmp_path / "whole")))
    assert same_checkpoints(tmp_path / "whole", tmp_path / "parts")
    wait_until(lambda: not any(map(is_running, started)), "the workers of the killed one have left")
