// Humanoid: Gymnasium's, in the same arithmetic.
#pragma once

#include "envs/mujoco/humanoid_body.h"

namespace envfleet {

template <int kVersion>
struct HumanoidTask : MujocoTask {
  explicit HumanoidTask(const Kwargs& kwargs)
      : MujocoTask(kwargs, kVersion, 5),
        forward_reward_weight(kwargs.number("forward_reward_weight", 1.25)),
        ctrl_cost_weight(kwargs.number("ctrl_cost_weight", 0.1)),
        healthy_reward(kwargs.number("healthy_reward", 5.0)),
        terminates(kwargs.flag("terminate_when_unhealthy", true)),
        healthy_z(range(kwargs, "healthy_z_range", 1.0, 2.0)),
        noise(noise_scale(kwargs, 1e-2)),
        view(kwargs, kVersion, true) {
    if constexpr (kVersion >= 5) {
      contact_cost_weight = kwargs.number("contact_cost_weight", 5e-7);
      contact_costs = range(kwargs, "contact_cost_range", -kInfinity, 10.0);
    }
    require(simulation.nq() >= 7 && simulation.nv() >= 6, "a free joint");
    mass = numpy_sum(simulation.nbody(), [&](std::size_t i) { return simulation.model().body_mass[i]; });
  }

  TaskInfos infos() const {
    if constexpr (kVersion >= 5) {
      return {.always = {{"x_position"},
                         {"y_position"},
                         {"distance_from_origin"},
                         {"tendon_length", Dtype::kFloat64, Computed::kTenLength},
                         {"tendon_velocity", Dtype::kFloat64, Computed::kTenVelocity}},
              .of_steps = {{"x_velocity"},
                           {"y_velocity"},
                           {"reward_survive"},
                           {"reward_forward"},
                           {"reward_ctrl"},
                           {"reward_contact"}}};
    }
    return {.of_steps = {{"x_position"},
                         {"y_position"},
                         {"distance_from_origin"},
                         {"x_velocity"},
                         {"y_velocity"},
                         {"reward_alive"},
                         {"reward_linvel"},
                         {"forward_reward"},
                         {"reward_quadctrl"}}};
  }

  void draw_start(Random& random, double* qpos, double* qvel) const {
    add_uniform(random, noise, qpos, simulation.nq());
    add_uniform(random, noise, qvel, simulation.nv());
  }

  void note_reset(Physics physics, double* notes) const {
    const double* qpos = physics.qpos();
    if constexpr (kVersion >= 5) note(notes, {qpos[0], qpos[1], numpy_norm(qpos, 2)});
  }

  struct Before {
    double x, y;
  };
  Before before(Physics physics) const { return {mass_center(physics, 0), mass_center(physics, 1)}; }

  Outcome judge(Before before, Physics physics, const float*, double* notes) const {
    const double xy[] = {mass_center(physics, 0), mass_center(physics, 1)};
    const double x_velocity = (xy[0] - before.x) / dt;
    const double y_velocity = (xy[1] - before.y) / dt;
    const double* qpos = physics.qpos();
    const bool is_healthy = healthy_z.first < qpos[2] && qpos[2] < healthy_z.second;
    const bool survives = is_healthy || (kVersion < 5 && terminates);
    const double survive = survives ? healthy_reward : 0.0 * healthy_reward;
    const double forward = forward_reward_weight * x_velocity;
    // Of the controls, in float64: unlike other environments' costs.
    const double ctrl_cost = ctrl_cost_weight * numpy_sum_of_squares(physics.ctrl(), simulation.nu());
    double costs = ctrl_cost;
    if constexpr (kVersion >= 5) {
      const double contact_cost = numpy_clip(
          contact_cost_weight * numpy_sum_of_squares(physics[Computed::kCfrcExt], simulation.size(Computed::kCfrcExt)),
          contact_costs.first, contact_costs.second);
      costs = ctrl_cost + contact_cost;
      note(notes, {qpos[0], qpos[1], numpy_norm(qpos, 2), x_velocity, y_velocity, survive, forward, -ctrl_cost,
                   -contact_cost});
    } else {
      note(notes, {xy[0], xy[1], numpy_norm(xy, 2), x_velocity, y_velocity, survive, forward, forward, -ctrl_cost});
    }
    return {.reward = (forward + survive) - costs, .terminated = !is_healthy && terminates};
  }

  std::size_t obs_size() const { return view.size(simulation); }
  void observe(Physics physics, double* out) const { view.observe(simulation, physics, out); }

 private:
  /// As np.einsum("b,bj->j", body_mass, xipos) adds it up.
  double mass_center(Physics physics, std::size_t axis) const {
    const double* xipos = physics[Computed::kXipos];
    double sum = 0.0;
    for (std::size_t i = 0; i < simulation.nbody(); ++i) sum += simulation.model().body_mass[i] * xipos[3 * i + axis];
    return sum / mass;
  }

  double forward_reward_weight, ctrl_cost_weight, healthy_reward;
  bool terminates;
  std::pair<double, double> healthy_z, contact_costs;
  double contact_cost_weight = 0.0;
  double noise;
  HumanoidView view;
  double mass;  // of all bodies
};

using HumanoidV5 = MujocoEnv<HumanoidTask<5>>;
using HumanoidV4 = MujocoEnv<HumanoidTask<4>>;

ENVFLEET_ENV("mujoco/Humanoid-v5", HumanoidV5);
ENVFLEET_ENV("mujoco/Humanoid-v4", HumanoidV4);

}  // namespace envfleet
