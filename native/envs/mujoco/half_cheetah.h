// HalfCheetah: Gymnasium's, in the same arithmetic.
#pragma once

#include "envs/mujoco/mujoco_env.h"

namespace envfleet {

template <int kVersion>
struct HalfCheetahTask : MujocoTask {
  explicit HalfCheetahTask(const Kwargs& kwargs)
      : MujocoTask(kwargs, kVersion, 5),
        forward_reward_weight(kwargs.number("forward_reward_weight", 1.0)),
        ctrl_cost_weight(kwargs.number("ctrl_cost_weight", 0.1)),
        noise(noise_scale(kwargs, 0.1)),
        num_skipped(kwargs.flag("exclude_current_positions_from_observation", true) ? 1 : 0) {
    require(simulation.nq() >= 1, "at least one coordinate");
  }

  TaskInfos infos() const {
    const TaskInfo ctrl{"reward_ctrl", Dtype::kFloat32};
    if constexpr (kVersion >= 5) {
      return {.always = {{"x_position"}}, .of_steps = {{"x_velocity"}, {"reward_forward"}, ctrl}};
    }
    return {.of_steps = {{"x_position"}, {"x_velocity"}, {"reward_run"}, ctrl}};
  }

  void draw_start(Random& random, double* qpos, double* qvel) const {
    add_uniform(random, noise, qpos, simulation.nq());
    add_normal(random, noise, qvel, simulation.nv());
  }

  void note_reset(Physics physics, double* notes) const {
    if constexpr (kVersion >= 5) note(notes, {physics.qpos()[0]});
  }

  double before(Physics physics) const { return physics.qpos()[0]; }

  Outcome judge(double x_before, Physics physics, const float* action, double* notes) const {
    const double x = physics.qpos()[0];
    const double x_velocity = (x - x_before) / dt;
    const double forward = forward_reward_weight * x_velocity;
    const float ctrl_cost = action_cost(ctrl_cost_weight, action);
    note(notes, {x, x_velocity, forward, -ctrl_cost});
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

using HalfCheetahV5 = MujocoEnv<HalfCheetahTask<5>>;
using HalfCheetahV4 = MujocoEnv<HalfCheetahTask<4>>;

ENVFLEET_ENV("mujoco/HalfCheetah-v5", HalfCheetahV5);
ENVFLEET_ENV("mujoco/HalfCheetah-v4", HalfCheetahV4);

}  // namespace envfleet
