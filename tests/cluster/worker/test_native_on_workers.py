"""Native envs of the user's own run on workers, too: these load the file that the head has loaded."""

import numpy as np
import pytest

import envfleet

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_workers")]

HEADER = """
#include "engine/registry.h"

struct Walk {
  struct Model {
    explicit Model(const envfleet::Kwargs& kwargs) : length(kwargs.number("length", 10)) {}
    envfleet::Spec spec() const {
      return {.observation = envfleet::Space::box<float>({1}, {-100}, {100}),
              .action = envfleet::Space::discrete(2), .infos = {}, .max_episode_steps = 30};
    }
    double length;
  };
  struct State { double place; };
  explicit Walk(const Model& shared) : model(&shared) {}
  void reset(envfleet::Random& random, const envfleet::Kwargs&) { state = {random.random()}; }
  envfleet::Outcome step(envfleet::Action action, envfleet::Random& random) {
    state.place += action.discrete() == 1 ? random.random() : -random.random();
    return {.reward = state.place, .terminated = state.place > model->length};
  }
  void observe(envfleet::Obs obs) const { obs.leaf<float>()[0] = static_cast<float>(state.place); }
  const Model* model;
  State state{};
};
ENVFLEET_ENV("WalkOnWorkers-v0", Walk);
"""


def test_workers_load_the_file_of_the_head(tmp_path):
    header, library = tmp_path / "walk.h", tmp_path / "walk.so"
    header.write_text(HEADER)
    envfleet.compile_native(header, library)
    assert envfleet.load_native(library) == ["WalkOnWorkers-v0"]
    actions = np.random.default_rng(0).integers(0, 2, (100, 4))
    with (
        envfleet.make("WalkOnWorkers-v0", 4, env_kwargs={"length": 2}) as pool,
        envfleet.ClusterEnv("WalkOnWorkers-v0", 2, 2, env_kwargs={"length": 2}) as cluster,
    ):
        np.testing.assert_array_equal(cluster.reset(seed=5)[0], pool.reset(seed=5)[0])
        for each in actions:
            for given, expected in zip(cluster.step(each)[:4], pool.step(each)[:4], strict=True):
                np.testing.assert_array_equal(given, expected)


def test_a_file_that_workers_do_not_find_is_named(tmp_path):
    header, library = tmp_path / "gone.h", tmp_path / "gone.so"
    header.write_text(HEADER.replace("WalkOnWorkers", "Gone"))
    envfleet.compile_native(header, library)
    envfleet.load_native(library)
    library.unlink()
    with pytest.raises(envfleet.WorkerFailed, match=r"gone\.so"):
        envfleet.ClusterEnv("Gone-v0", 1, 1)
