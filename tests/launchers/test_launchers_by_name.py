"""launcher_of: names and text become launchers, with the types that their settings have."""

import dataclasses

import pytest

import envfleet
from envfleet import SSH, Kubernetes, Local, Manual, Ray, Slurm, UsageError, launcher_of
from envfleet.launchers.by_name import LAUNCHER_NAMES
from envfleet.launchers.text_settings import forms_of


@pytest.mark.parametrize(
    ("name", "texts", "expected"),
    [
        ("local", [], Local()),
        ("local", ["pin=false", "log_dir=logs"], Local(pin=False, log_dir="logs")),
        ("local", ["pin=Yes"], Local(pin=True)),
        (
            "slurm",
            ["partition=cpu", "cpus-per-worker=2", "gpus_per_worker=a100:1", "mem_per_worker=4000", "exclusive=true"],
            Slurm(partition="cpu", cpus_per_worker=2, gpus_per_worker="a100:1", mem_per_worker=4000, exclusive=True),
        ),
        (
            "slurm",
            ["setup=module load a,b", "setup=export X=1", "extra_sbatch=exclude=node7", "extra_sbatch=contiguous"],
            Slurm(setup=["module load a,b", "export X=1"], extra_sbatch={"exclude": "node7", "contiguous": None}),
        ),
        ("slurm", ["allocation=new", "queue_timeout_s=2.5"], Slurm(allocation="new", queue_timeout_s=2.5)),
        ("slurm", ["partition=cpu", "partition=gpu"], Slurm(partition="gpu")),
        (
            "ray",
            ["address=a:1", "cpus_per_worker=0.5", "resources=memory=2e9", "queue_timeout_s=none"],
            Ray(address="a:1", cpus_per_worker=0.5, resources={"memory": 2e9}, queue_timeout_s=None),
        ),
        (
            "ray",
            ['runtime_env=pip=["shimmy"]', "runtime_env=working_dir=."],
            Ray(runtime_env={"pip": ["shimmy"], "working_dir": "."}),
        ),
        (
            "kubernetes",
            ["image=x/y:1", "cpus_per_worker=2", "env=A=b=c", 'tolerations={"key": "gpu"}', "run_as_non_root=true"],
            Kubernetes(
                "x/y:1", cpus_per_worker=2, env={"A": "b=c"}, tolerations=[{"key": "gpu"}], run_as_non_root=True
            ),
        ),
        ("ssh", ["hosts=a", "hosts=me@b", "port=2222"], SSH(["a", "me@b"], port=2222)),
        ("manual", ["python=python3"], Manual(python="python3")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_text_becomes_settings(name, texts, expected):
    assert launcher_of(name, texts) == expected
    with_types = launcher_of(name, texts)
    for field in dataclasses.fields(expected):
        assert type(getattr(with_types, field.name)) is type(getattr(expected, field.name)), field.name


def test_a_dict_may_have_values_of_both_kinds():
    given = {"cpus_per_worker": 2, "mem_per_worker": "4G", "setup": ["a", "b"], "extra_sbatch": {"nice": 5}}
    assert launcher_of("slurm", given) == Slurm(
        cpus_per_worker=2, mem_per_worker="4G", setup=["a", "b"], extra_sbatch={"nice": 5}
    )


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("slurn", [], "there is no launcher 'slurn'; known: local, slurm, ray, kubernetes, ssh, manual"),
        ("slurm", ["partion=cpu"], "Slurm has no setting 'partion'; known: partition, time_limit,"),
        ("slurm", ["partition"], "must be 'name=value'; got 'partition'"),
        ("slurm", "partition=cpu", "a list of texts"),
        ("slurm", ["cpus_per_worker=two"], "cpus_per_worker must be a whole number; got 'two'"),
        ("slurm", ["cpus_per_worker=0"], "cpus_per_worker must be a whole number of at least 1; got 0"),
        ("slurm", ["exclusive=maybe"], "exclusive must be true or false; got 'maybe'"),
        ("slurm", ["allocation=mine"], "allocation must be one of current, new, or 'none'; got 'mine'"),
        ("slurm", ["queue_timeout_s=soon"], "queue_timeout_s must be a number, or 'none'; got 'soon'"),
        ("ray", ["resources=memory"], "resources must be NAME=VALUE, the value a number; got 'memory'"),
        ("ray", ["resources=memory=much"], "got 'memory=much'"),
        ("kubernetes", ["image=x", "tolerations=[1]"], "tolerations must be a JSON object; got '[1]'"),
        ("kubernetes", [], "Kubernetes needs a value for 'image'"),
        ("ssh", [], "SSH needs a value for 'hosts'"),
        ("ssh", ["hosts=a,b"], 'one "host" or "user@host"; got \'a,b\''),
    ],
)
def test_what_is_wrong_is_named(name, settings, says):
    with pytest.raises(UsageError) as raised:
        launcher_of(name, settings)
    assert says in str(raised.value)


def test_all_settings_of_all_launchers_can_be_written():
    """A setting of a new type would be taken for text."""
    for kind in (Local, Slurm, Ray, Kubernetes, SSH, Manual):
        assert {form.expected for form in forms_of(kind).values()} <= {
            *("text", "a whole number", "a number", "true or false", "text or a whole number", "a JSON object"),
            *("true or false, or 'none'", "a number, or 'none'", "a whole number, or 'none'"),
            *("one of current, new, or 'none'", "NAME=VALUE, the value text", "NAME=VALUE, the value a number"),
            *("NAME=VALUE, the value text or a whole number", "NAME=VALUE, the value JSON, or text"),
        }


def test_every_launcher_has_its_name():
    public = {name for name in LAUNCHER_NAMES if name.lower() in {each.lower() for each in envfleet.__all__}}
    assert public == set(LAUNCHER_NAMES)
