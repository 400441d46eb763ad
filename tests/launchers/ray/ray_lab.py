"""A real Ray cluster of several nodes on this machine, and a launcher that shows its job."""

import contextlib
import os
import shutil
import tempfile
import time

import numpy as np

from envfleet.launchers.ray import session as ray_session
from envfleet.launchers.ray.settings import Ray
from envfleet.policies.functions import FunctionPolicy
from tests.support.waiting import descendants, is_running, wait_until

# A node whose raylet was killed counts as dead after two seconds, not after seventeen.
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10000,
    "health_check_failure_threshold": 3,
}


def push(weights, obs):
    """Workers import this: they find what this process finds."""
    return (obs @ weights["w"] > 0).astype(np.int64), np.zeros(len(obs), np.float32)


AGENT = FunctionPolicy(push, weights={"w": np.ones(4, np.float32)})


@contextlib.contextmanager
def ray_settings():
    """Ray leaves files in a folder that goes, makes no token in the user's home, and no environment behind."""
    before = dict(os.environ)
    folder = tempfile.mkdtemp(prefix="efray", dir="/tmp")  # short: there are sockets in it
    os.environ.update(RAY_TMPDIR=folder, RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    os.environ.pop("RAY_ADDRESS", None)
    try:
        yield folder
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder)


@contextlib.contextmanager
def ray_cluster(num_cpus_of_nodes):
    """A head node without CPUs for workers, where the driver is, and a node for each number."""
    from ray.cluster_utils import Cluster

    before = set(descendants(os.getpid()))
    with ray_settings():
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": SYSTEM_CONFIG},
        )
        try:
            for num_cpus in num_cpus_of_nodes:
                cluster.add_node(num_cpus=num_cpus)
            session = ray_session.hold(cluster.address)
            try:
                yield cluster
            finally:
                session.release()
        finally:
            cluster.shutdown()
    started = set(descendants(os.getpid())) - before
    wait_until(lambda: not any(map(is_running, started)), "all processes of Ray are gone", 30)


class Watched:
    """A launcher that shows its job."""

    def __init__(self, launcher):
        self.launcher = launcher
        self.job = None
        self.worker_job = None

    def __getattr__(self, name):
        return getattr(self.launcher, name)

    def launch(self, job):
        self.worker_job = job
        self.job = self.launcher.launch(job)
        return self.job

    def begun(self, worker):
        """Where a worker is, as its actor has told."""
        return self.job.unguarded._actors[worker].begun


def watched(**settings):
    return Watched(Ray(**settings))


def alive_actors():
    """Of this driver: their class and state, as Ray's control store has them."""
    import ray
    from ray._private.state import actors  # no public way without a dashboard

    job = ray.get_runtime_context().get_job_id()
    return [actor for actor in actors().values() if actor["JobID"] == job and actor["State"] != "DEAD"]


def groups():
    from ray.util.placement_group import placement_group_table

    return [each for each in placement_group_table().values() if each["state"] != "REMOVED"]


def worker_processes():
    """Worker commands below this process."""
    return [pid for pid in descendants(os.getpid()) if "envfleet.cluster.worker" in command_line(pid)]


def command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def raylet_pid(node):
    return node.all_processes["raylet"][0].process.pid


def seconds(started_s):
    return time.monotonic() - started_s
