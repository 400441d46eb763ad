// Hopper and Walker2d: Gymnasium's, in the same arithmetic. They differ in when they are healthy.
#pragma once

#include <algorithm>

#include "envs/mujoco/mujoco_env.h"

namespace envfleet {

/// Hopper: its whole state must be in a range, too.
template <int kVersion, bool kIsHopper>
struct PlanarWalkerTask : MujocoTask {
  explicit PlanarWalkerTask(const Kwargs& kwargs)
      : MujocoTask(kwargs, kVersion, 4),
        forward_reward_weight(kwargs.number("forward_reward_weight", 1.0)),
        ctrl_cost_weight(kwargs.number("ctrl_cost_weight", 1e-3)),
        healthy_reward(kwargs.number("healthy_reward", 1.0)),
        terminates(kwargs.flag("terminate_when_unhealthy", true)),
        healthy_z(kIsHopper ? range(kwargs, "healthy_z_range", 0.7, kInfinity)
                            : range(kwargs, "healthy_z_range", 0.8, 2.0)),
        healthy_angle(kIsHopper ? range(kwargs, "healthy_angle_range", -0.2, 0.2)
                                : range(kwargs, "healthy_angle_range", -1.0, 1.0)),
        noise(noise_scale(kwargs, 5e-3)),
        num_skipped(kwargs.flag("exclude_current_positions_from_observation", true) ? 1 : 0) {
    if constexpr (kIsHopper) healthy_state = range(kwargs, "healthy_state_range", -100.0, 100.0);
    require(simulation.nq() >= 3, "at least three coordinates");
  }

  TaskInfos infos() const {
    if constexpr (kVersion >= 5) {
      return {.always = {{"x_position"}, {"z_distance_from_origin"}},
              .of_steps = {{"x_velocity"}, {"reward_forward"}, {"reward_ctrl", Dtype::kFloat32}, {"reward_survive"}}};
    }
    return {.of_steps = {{"x_position"}, {"x_velocity"}}};
  }

  void draw_start(Random& random, double* qpos, double* qvel) const {
    add_uniform(random, noise, qpos, simulation.nq());
    add_uniform(random, noise, qvel, simulation.nv());
  }

  void note_reset(Physics physics, double* notes) const {
    if constexpr (kVersion >= 5) note(notes, {physics.qpos()[0], height_gained(physics)});
  }

  double before(Physics physics) const { return physics.qpos()[0]; }

  Outcome judge(double x_before, Physics physics, const float* action, double* notes) const {
    const double x = physics.qpos()[0];
    const double x_velocity = (x - x_before) / dt;
    const double forward = forward_reward_weight * x_velocity;
    const bool is_healthy = healthy(physics);
    const bool survives = is_healthy || (kVersion < 5 && terminates);
    const double survive = survives ? healthy_reward : 0.0 * healthy_reward;
    const float ctrl_cost = action_cost(ctrl_cost_weight, action);
    if constexpr (kVersion >= 5) {
      note(notes, {x, height_gained(physics), x_velocity, forward, -ctrl_cost, survive});
    } else {
      note(notes, {x, x_velocity});
    }
    return {.reward = (forward + survive) - ctrl_cost, .terminated = !is_healthy && terminates};
  }

  std::size_t obs_size() const { return simulation.nq() + simulation.nv() - num_skipped; }

  void observe(Physics physics, double* out) const {
    out = append(physics.qpos() + num_skipped, simulation.nq() - num_skipped, out);
    append_clipped(physics.qvel(), simulation.nv(), -10, 10, out);
  }

 private:
  double height_gained(Physics physics) const { return physics.qpos()[1] - simulation.model().qpos0[1]; }

  bool healthy(Physics physics) const {
    const double z = physics.qpos()[1];
    const double angle = physics.qpos()[2];
    if (!(healthy_z.first < z && z < healthy_z.second)) return false;
    if (!(healthy_angle.first < angle && angle < healthy_angle.second)) return false;
    if constexpr (!kIsHopper) return true;
    const auto is_in_range = [&](double value) { return healthy_state.first < value && value < healthy_state.second; };
    return std::all_of(physics.qpos() + 2, physics.qpos() + simulation.nq(), is_in_range) &&
           std::all_of(physics.qvel(), physics.qvel() + simulation.nv(), is_in_range);
  }

  double forward_reward_weight, ctrl_cost_weight, healthy_reward;
  bool terminates;
  std::pair<double, double> healthy_z, healthy_angle, healthy_state;
  double noise;
  std::size_t num_skipped;
};

using HopperV5 = MujocoEnv<PlanarWalkerTask<5, true>>;
using HopperV4 = MujocoEnv<PlanarWalkerTask<4, true>>;
using Walker2dV5 = MujocoEnv<PlanarWalkerTask<5, false>>;
using Walker2dV4 = MujocoEnv<PlanarWalkerTask<4, false>>;

ENVFLEET_ENV("mujoco/Hopper-v5", HopperV5);
ENVFLEET_ENV("mujoco/Hopper-v4", HopperV4);
ENVFLEET_ENV("mujoco/Walker2d-v5", Walker2dV5);
ENVFLEET_ENV("mujoco/Walker2d-v4", Walker2dV4);

}  // namespace envfleet
