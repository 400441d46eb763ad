"""Examples as modules; workers as in the cluster's tests."""

import importlib

import pytest

from tests.cluster.conftest import quick_workers as quick_workers
from tests.support.scripts import EXAMPLES


@pytest.fixture
def example(request, monkeypatch):
    """An example as a module; its workers find it where we do."""
    import torch

    monkeypatch.syspath_prepend(str(EXAMPLES))
    num_threads = torch.get_num_threads()
    yield importlib.import_module(request.param)
    torch.set_num_threads(num_threads)
