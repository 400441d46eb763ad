// Swimmer: Gymnasium's, in the same arithmetic.
#pragma once

#include "envs/mujoco/mujoco_env.h"

namespace envfleet {

template <int kVersion>
struct SwimmerTask : MujocoTask {
  explicit SwimmerTask(const Kwargs& kwargs)
      : MujocoTask(kwargs, kVersion, 4),
        forward_reward_weight(kwargs.number("forward_reward_weight", 1.0)),
        ctrl_cost_weight(kwargs.number("ctrl_cost_weight", 1e-4)),
        noise(noise_scale(kwargs, 0.1)),
        num_skipped(kwargs.flag("exclude_current_positions_from_observation", true) ? 2 : 0) {
    require(simulation.nq() >= 2, "at least two coordinates");
  }

  TaskInfos infos() const {
    const TaskInfo ctrl{"reward_ctrl", Dtype::kFloat32};
    if constexpr (kVersion >= 5) {
      return {.always = {{"x_position"}, {"y_position"}, {"distance_from_origin"}},
              .of_steps = {{"x_velocity"}, {"y_velocity"}, ctrl, {"reward_forward"}}};
    }
    return {.of_steps = {{"x_position"},
                         {"y_position"},
                         {"distance_from_origin"},
                         {"x_velocity"},
                         {"y_velocity"},
                         ctrl,
                         {"reward_fwd"},
                         {"forward_reward"}}};
  }

  void draw_start(Random& random, double* qpos, double* qvel) const {
    add_uniform(random, noise, qpos, simulation.nq());
    add_uniform(random, noise, qvel, simulation.nv());
  }

  void note_reset(Physics physics, double* notes) const {
    const double* xy = physics.qpos();
    if constexpr (kVersion >= 5) note(notes, {xy[0], xy[1], numpy_norm(xy, 2)});
  }

  struct Before {
    double x, y;
  };
  Before before(Physics physics) const { return {physics.qpos()[0], physics.qpos()[1]}; }

  Outcome judge(Before before, Physics physics, const float* action, double* notes) const {
    const double* xy = physics.qpos();
    const double x_velocity = (xy[0] - before.x) / dt;
    const double y_velocity = (xy[1] - before.y) / dt;
    const double forward = forward_reward_weight * x_velocity;
    const float ctrl_cost = action_cost(ctrl_cost_weight, action);
    note(notes, {xy[0], xy[1], numpy_norm(xy, 2), x_velocity, y_velocity, -ctrl_cost, forward});
    if constexpr (kVersion < 5) notes[7] = forward;
    return {.reward = forward - ctrl_cost};
  }

  std::size_t obs_size() const { return simulation.nq() + simulation.nv() - num_skipped; }

  void observe(Physics physics, double* out) const {
    out = append(physics.qpos() + num_skipped, simulation.nq() - num_skipped, out);
    append(physics.qvel(), simulation.nv(), out);
  }

 private:
  double forward_reward_weight, ctrl_cost_weight, noise;
  std::size_t num_skipped;
};

using SwimmerV5 = MujocoEnv<SwimmerTask<5>>;
using SwimmerV4 = MujocoEnv<SwimmerTask<4>>;

ENVFLEET_ENV("mujoco/Swimmer-v5", SwimmerV5);
ENVFLEET_ENV("mujoco/Swimmer-v4", SwimmerV4);

}  // namespace envfleet
