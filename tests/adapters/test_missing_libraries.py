"""An adapter whose library is missing says how to install it."""

import importlib
import sys

import pytest

import envfleet

NEEDED = {
    "dm_env": ("dm_env", r'pip install "envfleet\[dm-env\]"'),
    "dm_specs": ("dm_env", r'pip install "envfleet\[dm-env\]"'),
    "rl_games": ("rl_games.common", "pip install rl_games"),
    "skrl": ("torch", r'pip install "envfleet\[skrl\]"'),
    "tianshou": ("tianshou.env", r'pip install "envfleet\[tianshou\]"'),
    "torchrl": ("torch", r'pip install "envfleet\[torchrl\]"'),
}


@pytest.mark.parametrize("adapter", NEEDED)
def test_the_extra_is_named(adapter, monkeypatch):
    library, what_to_do = NEEDED[adapter]
    for name in (library, library.partition(".")[0]):  # the part may have been imported by another test
        monkeypatch.setitem(sys.modules, name, None)
    for name in (adapter, "dm_specs", "torchrl_forms"):
        monkeypatch.delitem(sys.modules, f"envfleet.adapters.{name}", raising=False)
    with pytest.raises(envfleet.MissingExtra, match=what_to_do):
        importlib.import_module(f"envfleet.adapters.{adapter}")
