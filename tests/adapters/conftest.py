"""Adapters run on clusters, too: see tests/cluster/conftest.py."""

from tests.cluster.conftest import quick_workers, run_folders, thread_of_pyzmq  # noqa: F401
