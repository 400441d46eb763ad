"""What tests must see of a pool or cluster that has no public name. The only place that knows where it is."""

import contextlib
from dataclasses import replace


def task_queues(pool):
    """The task queues of a process pool: pids of its children, envs at work."""
    return pool._backend._task_queues


def child_pid(pool, child=0):
    """The process of a child, if it has started."""
    return task_queues(pool).pid(child)


def num_children(pool):
    return pool._backend._shape.num_children


def spawner_pid(pool):
    return pool._backend._resources.spawner._process.pid


def native_core(pool):
    """The C++ side of a native pool: its helper threads, the runs of envs under way."""
    return pool._backend._pool


def native_choice(pool):
    """Which native env was chosen, with which limit of steps."""
    return pool._backend._choice


def fleet(cluster):
    """The head's records of its workers."""
    return cluster._head.fleet


@contextlib.contextmanager
def impatient_pool(pool, timeout_s=0.3):
    """Calls wait for this time only: what must not time out has the pool's own, on a busy machine too."""
    owners, before = (pool, pool._backend), pool._config
    for owner in owners:
        owner._config = replace(before, timeout_s=timeout_s)
    try:
        yield
    finally:
        for owner in owners:
            owner._config = before


@contextlib.contextmanager
def quick_builds(pool, start_timeout_s=1.0):
    """Envs that are built anew have this time only; tasks beyond the pool's timeout_s fail, as on workers."""
    before = pool._backend._config
    pool._backend._config = replace(before, start_timeout_s=start_timeout_s, fails_late=True)
    try:
        yield
    finally:
        pool._backend._config = before


@contextlib.contextmanager
def impatient_cluster(cluster, timeout_s=0.3):
    """Calls wait for this time only."""
    before = cluster._timing
    cluster._timing, cluster._calling._timeout_s = replace(before, timeout_s=timeout_s), timeout_s
    try:
        yield
    finally:
        cluster._timing, cluster._calling._timeout_s = before, before.timeout_s


def worker_state(worker, order):
    """The arrays with which a worker answers SaveState."""
    return worker._state(order)[1]


def restore_worker(worker, order, arrays):
    """What a worker does with RestoreState."""
    worker._restore(order, arrays)
