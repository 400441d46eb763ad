// Reacher: Gymnasium's, in the same arithmetic.
#pragma once

#include <cmath>

#include "envs/mujoco/mujoco_env.h"

namespace envfleet {

template <int kVersion>
struct ReacherTask : MujocoTask {
  explicit ReacherTask(const Kwargs& kwargs)
      : MujocoTask(kwargs, kVersion, 2), fingertip(body("fingertip")), target(body("target")) {
    if constexpr (kVersion >= 5) {
      dist_weight = kwargs.number("reward_dist_weight", 1);
      control_weight = kwargs.number("reward_control_weight", 1);
    }
    require(simulation.nq() == 4 && simulation.nv() == 4, "four coordinates");
  }

  TaskInfos infos() const { return {.of_steps = {{"reward_dist"}, {"reward_ctrl", Dtype::kFloat32}}}; }

  void draw_start(Random& random, double* qpos, double* qvel) const {
    add_uniform(random, 0.1, qpos, simulation.nq());
    do {
      for (int i = 2; i < 4; ++i) qpos[i] = random.uniform(-0.2, 0.2);
    } while (numpy_norm(qpos + 2, 2) >= 0.2);
    add_uniform(random, 0.005, qvel, simulation.nv());
    qvel[2] = qvel[3] = 0.0;
  }

  void note_reset(Physics, double*) const {}

  double before(Physics physics) const { return distance(physics); }

  /// v4 rewards the distance before the step.
  Outcome judge(double distance_before, Physics physics, const float* action, double* notes) const {
    const double dist = -(kVersion >= 5 ? distance(physics) : distance_before) * dist_weight;
    const float ctrl = -numpy_sum_of_squares(action, simulation.nu()) * static_cast<float>(control_weight);
    note(notes, {dist, ctrl});
    return {.reward = dist + ctrl};
  }

  std::size_t obs_size() const { return kVersion >= 5 ? 10 : 11; }

  void observe(Physics physics, double* out) const {
    const double* qpos = physics.qpos();
    for (int i = 0; i < 2; ++i) {
      out[i] = std::cos(qpos[i]);
      out[2 + i] = std::sin(qpos[i]);
      out[4 + i] = qpos[2 + i];
      out[6 + i] = physics.qvel()[i];
    }
    for (int i = 0; i < (kVersion >= 5 ? 2 : 3); ++i) out[8 + i] = physics.xpos(fingertip)[i] - physics.xpos(target)[i];
  }

 private:
  double distance(Physics physics) const {
    double apart[3];
    for (int i = 0; i < 3; ++i) apart[i] = physics.xpos(fingertip)[i] - physics.xpos(target)[i];
    return numpy_norm(apart, 3);
  }

  int fingertip, target;
  double dist_weight = 1.0;
  double control_weight = 1.0;
};

using ReacherV5 = MujocoEnv<ReacherTask<5>>;
using ReacherV4 = MujocoEnv<ReacherTask<4>>;

ENVFLEET_ENV("mujoco/Reacher-v5", ReacherV5);
ENVFLEET_ENV("mujoco/Reacher-v4", ReacherV4);

}  // namespace envfleet
