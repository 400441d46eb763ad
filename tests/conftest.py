"""What every test must leave behind: nothing."""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tests.support.waiting import own_children, wait_until

with contextlib.suppress(ImportError):  # `make test-others` has no Hypothesis
    from hypothesis import HealthCheck, settings

    # By default an example that takes 200 ms fails, as any may on a busy machine: tests do not assert on time.
    settings.register_profile("envfleet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("envfleet")

# Tianshou is the only one here with functions for Numba, which would compile them for 16 s of CPU in each process.
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
# torch has processes for compiling as soon as rl_games is imported, and they would be left behind.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# TorchRL leaves a start method alone that was asked for once; else it changes it for all that follows in its process.
multiprocessing.get_start_method()

# A shell ignores Ctrl-C for what it runs in the background, and so would the scripts that are interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Folders whose tests share an engine that takes long to start, the slowest first. These files of them need none.
ENGINES = ("launchers/slurm", "launchers/ray", "launchers/kubernetes", "launchers/ssh")
WITHOUT_ENGINE = {
    "test_kube_lease.py",
    "test_kube_manifest.py",
    "test_kube_status.py",
    "test_ray_settings.py",
    "test_slurm_commands.py",
    "test_slurm_script.py",
}
# Files that take longest, the longest first: none of them is begun when the others are done.
LONGEST = (
    "pool/native/test_equals_gymnasium.py",
    "cluster/test_equals_pool.py",
    "cluster/test_cluster_promises.py",
    "pool/simulators/test_mujoco.py",
    "cluster/network/test_chaos.py",
    "cluster/network/test_tcp_outage.py",
    "examples/test_examples_resume.py",
    "examples/test_example_ppo.py",
    "examples/test_examples_off_policy.py",
    "cluster/test_detach.py",
    "cluster/test_failures.py",
    "test_docs.py",
    "pool/simulators/test_box2d.py",
    "cluster/test_scaling.py",
    "cluster/checkpoint/test_resume.py",
    "cluster/checkpoint/test_killed_head.py",
    "pool/simulators/test_atari_pools.py",
    "pool/simulators/test_atari_equals_gymnasium.py",
    "examples/test_examples_devices.py",
    "cluster/sync/test_aps.py",
    "cluster/worker/test_leaving.py",
    "cluster/test_slow_envs.py",
    "cluster/sync/test_standstill.py",
    "launchers/test_launcher_conformance.py",
    "launchers/test_manual.py",
    "cluster/wire/test_large_messages.py",
    "cluster/head/test_handshake_limits.py",
    # Of those of `make test-quick`:
    "testing/test_pools.py",
    "testing/test_programs.py",
    "pool/test_pool_gymnasium_api.py",
    "pool/test_partial_steps.py",
    "cluster/worker/test_pools_are_built_once.py",
    "cluster/test_stepping.py",
    "pool/native/test_nested_spaces.py",
)


def pytest_collection_modifyitems(items):
    """Engines come first, then the longest files."""
    if any("fake_gpu" in item.fixturenames for item in items if isinstance(item, pytest.Function)):
        with contextlib.suppress(ImportError):  # without torch, those tests are skipped
            # torch makes its threads for backward() at the first one, for the devices that it knows by then.
            importlib.import_module("tests.support.fake_gpu")
    first = [*ENGINES, *LONGEST]
    for item in items:
        if _group_of(item.nodeid) in ENGINES:
            item.add_marker(pytest.mark.engine)
    items.sort(key=lambda item: _place_in(first, _group_of(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Several processes share the tests (see the Makefile), by engines and by files, for fixtures live as long.

    (With pytest 9, xdist 3.8 does not see the groups of its own mark.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _group_of(nodeid)

    return ByGroup(config, log)


def _group_of(nodeid):
    """The folder, if the test needs its engine; otherwise the file."""
    path = Path(nodeid.partition("::")[0]).relative_to("tests")
    folder = str(path.parent)
    return folder if folder in ENGINES and path.name not in WITHOUT_ENGINE else str(path)


def _place_in(names, name):
    return names.index(name) if name in names else len(names)


@pytest.fixture(scope="session")
def fake_gpu():
    """The module tests.support.fake_gpu; its device is known to torch from the start (see above)."""
    pytest.importorskip("torch.utils.backend_registration", reason="torch cannot have a device written in Python")
    return importlib.import_module("tests.support.fake_gpu")


@pytest.fixture(scope="module")
def quick_spawners(request):
    """Processes of this module's pools are forked, from one that has imported the module: see forked_spawners.py."""
    from tests.support.forked_spawners import forked_spawners

    with pytest.MonkeyPatch.context() as monkeypatch, forked_spawners(monkeypatch, [request.module.__name__]):
        yield


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process, no file descriptor and no shared-memory file outlives its test."""
    processes, shared_memory, files = own_children(), _shared_memory(), _files()
    yield
    if own_children() <= processes and _shared_memory() <= shared_memory and len(_files()) <= len(files):
        return
    gc.collect()  # which takes long when torch is loaded
    # What has been told to end may take a moment on a busy machine: processes, threads that close a connection.
    wait_until(lambda: own_children() <= processes, lambda: f"processes are gone: {own_children() - processes}")
    wait_until(lambda: _shared_memory() <= shared_memory, lambda: f"files are gone: {_shared_memory() - shared_memory}")
    wait_until(lambda: len(_files()) <= len(files), lambda: f"files are closed: {_new(_files(), files)}")


def _files():
    """What is open, by number of the descriptor."""
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them, or one that is closed meanwhile
            files[number] = os.readlink(f"/proc/self/fd/{number}")
    return files


def _new(files, before):
    return {number: name for number, name in files.items() if before.get(number) != name}


def _shared_memory():
    """Named segments as Python makes them; other programs have theirs there too."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "envfleet"))}
