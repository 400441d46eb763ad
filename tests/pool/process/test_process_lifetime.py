"""Children and shared memory never outlive the pool, whatever happens to the process that owns it."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import envfleet
from envfleet.testing import Act, ScriptedEnv
from tests.support.waiting import descendants, is_running, own_children, wait_until

pytestmark = pytest.mark.slow

MAKE = """
    import sys, time
    import numpy as np
    import envfleet
    from envfleet.testing import Act, ScriptedEnv
    pool = envfleet.make(ScriptedEnv, 4, num_workers=2, backend="process")
    pool.reset(seed=0)
    print("ready", flush=True)
"""


def start_script(tmp_path: Path, body: str, **kwargs) -> subprocess.Popen:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(MAKE) + textwrap.dedent(body))
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, **kwargs)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "hung in a step"])
def test_nothing_outlives_a_parent_that_is_killed(tmp_path, busy):
    body = """
        pool.set_attr("sleep_s", 60.0)
        pool.send(np.full(4, Act.SLEEP))
    """
    process = start_script(tmp_path, (body if busy else "") + "\n        time.sleep(60)")
    family = descendants(process.pid)
    assert len(family) == 3  # the spawner and two children
    memory_files = {
        os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir() if "memfd" in os.readlink(link)
    }
    assert memory_files, "shared memory is anonymous: it cannot outlive the processes that map it"
    process.kill()
    process.wait(10)
    process.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in family), "the spawner and the children are gone", 5.0)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError('the script is wrong')", 1),
        ("pool.send(np.full(4, Act.GO_ON))", 0),
        ("import os; os._exit(4)", 4),
        ("import threading; threading.Thread(target=time.sleep, args=(0.2,)).start()", 0),
    ],
    ids=["end", "exit", "exception", "in flight", "os._exit", "thread"],
)
def test_a_script_that_never_closes_its_pool_ends_cleanly(tmp_path, body, status):
    process = start_script(tmp_path, body, stderr=subprocess.DEVNULL)
    family = descendants(process.pid)
    assert process.wait(20) == status
    process.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in family), "all its processes are gone")


def test_a_script_needs_no_main_guard_and_may_define_its_env(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import gymnasium, numpy as np, envfleet
            print("loaded")
            class Mine(gymnasium.Env):
                observation_space = gymnasium.spaces.Discrete(9)
                action_space = gymnasium.spaces.Discrete(2)
                def reset(self, *, seed=None, options=None):
                    return 0, {}
                def step(self, action):
                    return 7, 1.0, False, False, {"mine": Mine}
                def same(self, value):
                    return value.number
            class Value:
                number = 4
            gymnasium.register("Mine-v0", entry_point=Mine, max_episode_steps=5)
            for env in (Mine, "Mine-v0", lambda: Mine()):
                with envfleet.make(env, 3, num_workers=2) as pool:
                    pool.reset(seed=0)
                    obs, *_, info = pool.step(np.zeros(3, int))
                    print(obs.tolist(), info["mine"][0].__name__, pool.call("same", Value())[2])
            """
        )
    )
    output = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert output.stdout == "loaded\n" + "[7, 7, 7] Mine 4\n" * 3
    assert output.stderr == ""


def test_ctrl_c_interrupts_a_wait_and_the_pool_closes(tmp_path):
    body = """
        pool.set_attr("sleep_s", 60.0)
        print("waiting", flush=True)
        try:
            pool.step(np.full(4, Act.SLEEP))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        import envfleet.pool.process.resources
        envfleet.pool.process.resources.CLOSE_GRACE_S = 0.1
    """
    process = start_script(tmp_path, body, start_new_session=True)
    family = descendants(process.pid)
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group, children included
    assert process.stdout.readline() == "interrupted\n"
    assert process.wait(20) == 0
    process.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in family), "all its processes are gone")


def test_garbage_collection_closes_a_pool():
    before = own_children()
    pool = envfleet.make(ScriptedEnv, 2, num_workers=1, backend="process")
    obs, _ = pool.reset(seed=0)
    assert own_children() > before
    del pool
    gc.collect()
    wait_until(lambda: own_children() <= before, "its processes are gone")
    assert obs.shape == (2, 4) and obs[0, 1] == 0  # a lease outlives its pool


def test_a_pool_made_in_a_thread_outlives_the_thread():
    made = []
    thread = threading.Thread(
        target=lambda: made.append(envfleet.make(ScriptedEnv, 2, num_workers=1, backend="process"))
    )
    thread.start()
    thread.join(30)
    with made[0] as pool:
        pool.reset(seed=0)
        assert pool.step(np.full(2, Act.GO_ON))[0][:, 1].tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_fork_of_the_parent_neither_harms_nor_keeps_the_pool():
    others = own_children()
    pool = envfleet.make(ScriptedEnv, 2, num_workers=1, backend="process")
    pool.reset(seed=0)
    before = own_children() - others
    read, write = os.pipe()
    forked = os.fork()
    if forked == 0:
        pool.close()  # not its pool: nothing happens
        os.read(read, 1)
        os._exit(0)
    try:
        assert pool.step(np.full(2, Act.GO_ON))[0][:, 1].tolist() == [1, 1]
        pool.close()
        wait_until(lambda: not any(is_running(pid) for pid in before), "closed although the fork still lives")
    finally:
        os.write(write, b"x")
        os.waitpid(forked, 0)
        os.close(read)
        os.close(write)


def test_memory_stays_flat_over_a_million_steps():
    with envfleet.make(_Idle, 100, num_workers=2, backend="process") as pool:
        pool.reset(seed=0)
        actions = np.zeros(100, dtype=np.int64)
        sizes = []
        for step in range(10_000):
            pool.step(actions)
            if step % 1000 == 999:
                sizes.append(_resident_bytes())
        store = pool._backend._arrays.stores[0]
        assert store.num_buffers <= 4 and store.num_leased == 0
        assert max(sizes) - sizes[0] < 2_000_000, sizes


class _Idle(ScriptedEnv):
    def step(self, action):
        return self._state, 0.0, False, False, {}


def _resident_bytes() -> int:
    pids = [os.getpid(), *descendants(os.getpid())]
    pages = 0
    for pid in pids:
        pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
