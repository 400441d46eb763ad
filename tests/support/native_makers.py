"""make() for the native twins of envfleet.testing's envs."""

from functools import cache
from pathlib import Path

import envfleet
from envfleet.testing import BoxActionEnv, ScriptedEnv

IDS = {ScriptedEnv: "Scripted-v0", BoxActionEnv: "BoxAction-v0"}


@cache
def load_scripted() -> None:
    """Compile and load them, once for all tests."""
    envfleet.load_native(Path(__file__).parent / "scripted.h")


def make_native(env, num_envs=None, **kwargs):
    """Like envfleet.make, for an env class that has a native twin."""
    load_scripted()
    return envfleet.make(IDS[env], num_envs, backend="native", **kwargs)
