"""Programs that hypothesis invents: every backend equals Gymnasium's SyncVectorEnv, and all equal each other."""

from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envfleet
from envfleet.pool.native import backend as native
from envfleet.testing import Act, Program, ScriptedEnv, run_program
from envfleet.testing.programs import HARMLESS, require_equal
from tests.support.native_makers import make_native

pytestmark = pytest.mark.usefixtures("quick_spawners")

NUM_ENVS = 3
MODES = list(envfleet.Autoreset)
ACTS = st.lists(st.sampled_from([int(act) for act in HARMLESS]), min_size=NUM_ENVS, max_size=NUM_ENVS)
OPS = st.one_of(
    st.tuples(st.just("step"), ACTS),
    st.tuples(st.just("reset"), st.one_of(st.none(), st.integers(0, 50))),
    st.tuples(st.just("reset_some"), st.lists(st.booleans(), min_size=NUM_ENVS, max_size=NUM_ENVS)),
)


@pytest.fixture(scope="module")
def pools():
    """One pool for each backend and mode; a seeded reset starts each program afresh."""
    makers = {
        "serial": partial(envfleet.make, backend="serial"),
        "process": partial(envfleet.make, backend="process", num_workers=2),
        "native": partial(make_native, num_workers=2),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "HELP_WORTH_S", 0.0)
        made = {
            (backend, mode): make(ScriptedEnv, NUM_ENVS, autoreset_mode=mode)
            for backend, make in makers.items()
            for mode in MODES
        }
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(autouse=True)
def nothing_is_left(pools):
    """These pools outlive their tests, but not their module."""


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("backend", ["serial", "process", "native"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ops=st.lists(OPS, max_size=30))
def test_any_program_equals_gymnasium(pools, backend, mode, ops):
    run_program(pools[backend, mode], Program(NUM_ENVS, ops))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_workers(num_workers, mode):
    """Also where envs fail and are restarted."""
    generator = np.random.default_rng(1)
    kwargs = {"autoreset_mode": mode, "on_env_error": "restart", "max_env_restarts": 100}
    with (
        envfleet.make(ScriptedEnv, 5, backend="serial", **kwargs) as serial,
        envfleet.make(ScriptedEnv, 5, backend="process", num_workers=num_workers, **kwargs) as pool,
    ):
        require_equal(pool.reset(seed=9), serial.reset(seed=9))
        for _ in range(60):
            # Few of them raise: before an env is built anew there is a pause, which grows.
            actions = generator.choice([Act.GO_ON] * 12 + [Act.TERMINATE, Act.TRUNCATE] * 2 + [Act.RAISE], 5)
            got, expected = pool.step(actions), serial.step(actions)
            require_equal(got, expected)
            ended = expected[2] | expected[3]
            if mode is envfleet.Autoreset.DISABLED and ended.any():
                pool.reset(seed=5, options={"reset_mask": ended})
                serial.reset(seed=5, options={"reset_mask": ended})
