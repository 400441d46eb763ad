// InvertedDoublePendulum: Gymnasium's, in the same arithmetic.
#pragma once

#include <cmath>

#include "envs/mujoco/mujoco_env.h"
#include "envs/python_math.h"

namespace envfleet {

template <int kVersion>
struct InvertedDoublePendulumTask : MujocoTask {
  explicit InvertedDoublePendulumTask(const Kwargs& kwargs) : MujocoTask(kwargs, kVersion, 5) {
    if constexpr (kVersion >= 5) {
      healthy_reward = kwargs.number("healthy_reward", 10.0);
      noise = noise_scale(kwargs, 0.1);
    }
    require(simulation.nq() == 3 && simulation.nv() == 3, "three coordinates");
    require(simulation.model().nsite >= 1, "a site");
  }

  TaskInfos infos() const {
    if constexpr (kVersion < 5) return {};
    return {.of_steps = {{"reward_survive"}, {"distance_penalty"}, {"velocity_penalty"}}};
  }

  void draw_start(Random& random, double* qpos, double* qvel) const {
    add_uniform(random, noise, qpos, simulation.nq());
    add_normal(random, noise, qvel, simulation.nv());
  }

  void note_reset(Physics, double*) const {}

  struct Before {};
  Before before(Physics) const { return {}; }

  Outcome judge(Before, Physics physics, const float*, double* notes) const {
    const double x = physics[Computed::kSiteXpos][0];
    const double y = physics[Computed::kSiteXpos][2];
    const double* v = physics.qvel();
    const bool has_fallen = y <= 1;
    const double distance = 0.01 * python_square(x) + python_square(y - 2);
    const double speed = 1e-3 * python_square(v[1]) + 5e-3 * python_square(v[2]);
    if constexpr (kVersion < 5) return {.reward = 10 - distance - speed, .terminated = has_fallen};
    const double survive = healthy_reward * (has_fallen ? 0 : 1);
    note(notes, {survive, -distance, -speed});
    return {.reward = survive - distance - speed, .terminated = has_fallen};
  }

  std::size_t obs_size() const { return kVersion >= 5 ? 9 : 11; }

  void observe(Physics physics, double* out) const {
    const double* qpos = physics.qpos();
    *out++ = qpos[0];
    for (int i = 1; i < 3; ++i) *out++ = std::sin(qpos[i]);
    for (int i = 1; i < 3; ++i) *out++ = std::cos(qpos[i]);
    out = append_clipped(physics.qvel(), 3, -10, 10, out);
    append_clipped(physics[Computed::kQfrcConstraint], kVersion >= 5 ? 1 : 3, -10, 10, out);
  }

 private:
  double healthy_reward = 10.0;
  double noise = 0.1;
};

using InvertedDoublePendulumV5 = MujocoEnv<InvertedDoublePendulumTask<5>>;
using InvertedDoublePendulumV4 = MujocoEnv<InvertedDoublePendulumTask<4>>;

ENVFLEET_ENV("mujoco/InvertedDoublePendulum-v5", InvertedDoublePendulumV5);
ENVFLEET_ENV("mujoco/InvertedDoublePendulum-v4", InvertedDoublePendulumV4);

}  // namespace envfleet
