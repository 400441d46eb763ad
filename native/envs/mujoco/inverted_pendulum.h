// InvertedPendulum: Gymnasium's, in the same arithmetic.
#pragma once

#include <algorithm>
#include <cmath>

#include "envs/mujoco/mujoco_env.h"

namespace envfleet {

template <int kVersion>
struct InvertedPendulumTask : MujocoTask {
  explicit InvertedPendulumTask(const Kwargs& kwargs) : MujocoTask(kwargs, kVersion, 2) {
    if constexpr (kVersion >= 5) noise = noise_scale(kwargs, 0.01);
    require(simulation.nq() == 2 && simulation.nv() == 2, "two coordinates");
  }

  TaskInfos infos() const {
    if constexpr (kVersion < 5) return {};
    return {.of_steps = {{"reward_survive", Dtype::kInt64}}};
  }

  void draw_start(Random& random, double* qpos, double* qvel) const {
    add_uniform(random, noise, qpos, simulation.nq());
    add_uniform(random, noise, qvel, simulation.nv());
  }

  void note_reset(Physics, double*) const {}

  struct Before {};
  Before before(Physics) const { return {}; }

  Outcome judge(Before, Physics physics, const float*, double* notes) const {
    const double* q = physics.qpos();
    const double* v = physics.qvel();
    const bool is_finite = std::isfinite(q[0]) && std::isfinite(q[1]) && std::isfinite(v[0]) && std::isfinite(v[1]);
    const bool has_fallen = !is_finite || std::abs(q[1]) > 0.2;
    const double survive = has_fallen ? 0.0 : 1.0;
    if constexpr (kVersion < 5) return {.reward = 1.0, .terminated = has_fallen};
    note(notes, {survive});
    return {.reward = survive, .terminated = has_fallen};
  }

  std::size_t obs_size() const { return 4; }

  void observe(Physics physics, double* out) const {
    out = append(physics.qpos(), 2, out);
    append(physics.qvel(), 2, out);
  }

 private:
  double noise = 0.01;
};

using InvertedPendulumV5 = MujocoEnv<InvertedPendulumTask<5>>;
using InvertedPendulumV4 = MujocoEnv<InvertedPendulumTask<4>>;

ENVFLEET_ENV("mujoco/InvertedPendulum-v5", InvertedPendulumV5);
ENVFLEET_ENV("mujoco/InvertedPendulum-v4", InvertedPendulumV4);

}  // namespace envfleet
