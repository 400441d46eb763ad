"""CleanRL's scripts run with the lines changed that docs/cleanrl.md ("cleanrl.md") shows, and no others.

`make build/cleanrl/ready` takes the scripts from CleanRL's wheel; they are no part of this repository.
"""

import ast
import re
import subprocess
import sys
import textwrap

import pytest

from tests.support.scripts import DOCS, ROOT, script_environment

pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
pytest.importorskip("tensorboard")

SCRIPTS = ROOT / "build" / "cleanrl" / "cleanrl"
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (SCRIPTS / "ppo.py").exists(), reason="CleanRL's scripts: make build/cleanrl/ready"),
]

CHANGE = re.compile(r"^In place of `(.*?)`.*?:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOST = ["--cuda", "False"]


def changes(heading):
    """(how the statement begins, what is in its place) of a section of the page."""
    page = (DOCS / "cleanrl.md").read_text()
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = CHANGE.findall(section)
    assert len(found) == section.count("```python"), "each block says what it is in place of"
    return dict(found)


def changed(script, replacements):
    """The script's text with each statement replaced, which must be there once."""
    source = (SCRIPTS / script).read_text()
    lines = source.splitlines()
    places = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            for begin in replacements:
                if lines[node.lineno - 1].strip().startswith(begin):
                    places.setdefault(begin, set()).add((node.lineno, node.end_lineno, node.col_offset))
    assert {begin: len(found) for begin, found in places.items()} == dict.fromkeys(replacements, 1)
    for begin, ((first, last, indent),) in sorted(places.items(), key=lambda each: -min(each[1])[0]):
        lines[first - 1 : last] = textwrap.indent(replacements[begin], " " * indent).splitlines()
    return "\n".join(lines) + "\n"


def run(tmp_path, script, text, *arguments):
    """The returns that the script has printed."""
    (tmp_path / script).write_text(text)
    done = subprocess.run(
        [sys.executable, script, *HOST, *map(str, arguments)],
        cwd=tmp_path,
        env=script_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(tmp_path.glob("runs/**/events.*"))
    return [float(each) for each in re.findall(r"episodic_return=\[?([-\d.e+]+)", done.stdout)]


PPO = ["--num-envs", 4, "--num-steps", 32, "--total-timesteps", 384]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("ppo.py", PPO),
        (
            "ppo_continuous_action.py",
            [
                "--env-id",
                "Pendulum-v1",
                "--num-envs",
                2,
                "--num-steps",
                256,
                "--total-timesteps",
                512,
                "--update-epochs",
                1,
            ],
        ),
        ("dqn.py", ["--total-timesteps", 300, "--learning-starts", 150, "--batch-size", 32]),
        (
            "sac_continuous_action.py",
            ["--env-id", "Hopper-v5", "--total-timesteps", 150, "--learning-starts", 100, "--batch-size", 16],
        ),
        (
            "ppo_atari.py",
            ["--env-id", "Breakout-v5", "--num-envs", 2, "--num-steps", 64, "--total-timesteps", 256],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_script_trains_with_the_lines_of_the_page(tmp_path, script, arguments):
    for module in {"ppo_atari.py": ["ale_py"], "sac_continuous_action.py": ["mujoco"]}.get(script, []):
        pytest.importorskip(module)
    returns = run(tmp_path, script, changed(script, changes(script)), *arguments)
    assert returns
    if script in ("ppo.py", "dqn.py"):
        assert all(value >= 8 for value in returns)  # CartPole lasts that long, whatever the actions
    if script == "ppo_continuous_action.py":
        assert all(-2000 < value < -100 for value in returns)  # Pendulum's own rewards, not the normalized ones


def test_the_page_has_the_lines_for_a_cluster_that_is_stepped(tmp_path):
    replacements = changes("dqn.py") | changes("On a cluster, step by step")
    returns = run(
        tmp_path, "dqn.py", changed("dqn.py", replacements), "--total-timesteps", 300, "--learning-starts", 280
    )
    assert returns


def test_the_page_has_the_lines_for_a_policy_on_the_workers(tmp_path):
    replacements = changes("On a cluster, with the policy on the workers (DETACH)")
    returns = run(tmp_path, "ppo.py", changed("ppo.py", replacements), *PPO)
    assert len(returns) > 5 and all(value >= 8 for value in returns)
