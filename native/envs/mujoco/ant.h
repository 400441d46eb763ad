// Ant: Gymnasium's, in the same arithmetic.
#pragma once

#include <algorithm>
#include <cmath>

#include "envs/mujoco/mujoco_env.h"

namespace envfleet {

template <int kVersion>
struct AntTask : MujocoTask {
  explicit AntTask(const Kwargs& kwargs)
      : MujocoTask(kwargs, kVersion, 5),
        ctrl_cost_weight(kwargs.number("ctrl_cost_weight", 0.5)),
        contact_cost_weight(kwargs.number("contact_cost_weight", 5e-4)),
        healthy_reward(kwargs.number("healthy_reward", 1.0)),
        terminates(kwargs.flag("terminate_when_unhealthy", true)),
        healthy_z(range(kwargs, "healthy_z_range", 0.2, 1.0)),
        contact_forces(range(kwargs, "contact_force_range", -1.0, 1.0)),
        noise(noise_scale(kwargs, 0.1)),
        num_skipped(kwargs.flag("exclude_current_positions_from_observation", true) ? 2 : 0) {
    require(simulation.nq() >= 3, "at least three coordinates");
    if constexpr (kVersion >= 5) {
      forward_reward_weight = kwargs.number("forward_reward_weight", 1.0);
      shows_contacts = kwargs.flag("include_cfrc_ext_in_observation", true);
      counts_contacts = true;
      if (kwargs.is_text("main_body")) {
        main_body = body(kwargs.text("main_body", "").c_str());
      } else {
        const double number = kwargs.number("main_body", 1);
        require(number >= 0 && number < static_cast<double>(simulation.nbody()) && number == std::floor(number),
                "the body 'main_body'");
        main_body = static_cast<int>(number);
      }
    } else {
      shows_contacts = counts_contacts = kwargs.flag("use_contact_forces", false);
      main_body = body("torso");
      require_frames_per_s(20);
      require(simulation.nq() + simulation.nv() == 29 && simulation.nbody() == 14, "the ant's joints and bodies");
    }
  }

  TaskInfos infos() const {
    if constexpr (kVersion >= 5) {
      return {.always = {{"x_position"}, {"y_position"}, {"distance_from_origin"}},
              .of_steps = {{"x_velocity"},
                           {"y_velocity"},
                           {"reward_forward"},
                           {"reward_ctrl", Dtype::kFloat32},
                           {"reward_contact"},
                           {"reward_survive"}}};
    }
    // Gymnasium's v4 calls the cost of contacts reward_ctrl, where it counts them.
    return {.of_steps = {{"x_position"},
                         {"y_position"},
                         {"distance_from_origin"},
                         {"x_velocity"},
                         {"y_velocity"},
                         {"reward_forward"},
                         {"forward_reward"},
                         {"reward_ctrl", counts_contacts ? Dtype::kFloat64 : Dtype::kFloat32},
                         {"reward_survive"}}};
  }

  void draw_start(Random& random, double* qpos, double* qvel) const {
    add_uniform(random, noise, qpos, simulation.nq());
    add_normal(random, noise, qvel, simulation.nv());
  }

  void note_reset(Physics physics, double* notes) const {
    const double* qpos = physics.qpos();
    if constexpr (kVersion >= 5) note(notes, {qpos[0], qpos[1], numpy_norm(qpos, 2)});
  }

  struct Before {
    double x, y;
  };
  Before before(Physics physics) const { return {physics.xpos(main_body)[0], physics.xpos(main_body)[1]}; }

  Outcome judge(Before before, Physics physics, const float* action, double* notes) const {
    const double* xy = physics.xpos(main_body);
    const double x_velocity = (xy[0] - before.x) / dt;
    const double y_velocity = (xy[1] - before.y) / dt;
    const bool is_healthy = healthy(physics);
    const float ctrl_cost = action_cost(ctrl_cost_weight, action);
    const double forward = x_velocity * forward_reward_weight;
    const bool survives = is_healthy || (kVersion < 5 && terminates);
    const double survive = survives ? healthy_reward : 0.0 * healthy_reward;
    const double contacts = counts_contacts ? contact_cost(physics) : 0.0;
    const double costs = counts_contacts ? ctrl_cost + contacts : ctrl_cost;
    if constexpr (kVersion >= 5) {
      const double* qpos = physics.qpos();
      note(notes,
           {qpos[0], qpos[1], numpy_norm(qpos, 2), x_velocity, y_velocity, forward, -ctrl_cost, -contacts, survive});
    } else {
      note(notes, {xy[0], xy[1], numpy_norm(xy, 2), x_velocity, y_velocity, forward, forward,
                   counts_contacts ? -contacts : -ctrl_cost, survive});
    }
    return {.reward = (forward + survive) - costs, .terminated = !is_healthy && terminates};
  }

  std::size_t obs_size() const {
    return simulation.nq() - num_skipped + simulation.nv() + (shows_contacts ? 6 * num_shown_bodies() : 0);
  }

  void observe(Physics physics, double* out) const {
    out = append(physics.qpos() + num_skipped, simulation.nq() - num_skipped, out);
    out = append(physics.qvel(), simulation.nv(), out);
    if (!shows_contacts) return;
    const std::size_t first_body = simulation.nbody() - num_shown_bodies();
    append_clipped(physics[Computed::kCfrcExt] + 6 * first_body, 6 * num_shown_bodies(), contact_forces.first,
                   contact_forces.second, out);
  }

 private:
  /// The world is a body, too, and no force acts on it: v5 does not show it.
  std::size_t num_shown_bodies() const { return simulation.nbody() - (kVersion >= 5 ? 1 : 0); }

  bool healthy(Physics physics) const {
    const auto is_finite = [](double value) { return std::isfinite(value); };
    const double z = physics.qpos()[2];
    return std::all_of(physics.qpos(), physics.qpos() + simulation.nq(), is_finite) &&
           std::all_of(physics.qvel(), physics.qvel() + simulation.nv(), is_finite) && healthy_z.first <= z &&
           z <= healthy_z.second;
  }

  double contact_cost(Physics physics) const {
    const double* forces = physics[Computed::kCfrcExt];
    return contact_cost_weight * numpy_sum(simulation.size(Computed::kCfrcExt), [&](std::size_t i) {
             const double clipped = numpy_clip(forces[i], contact_forces.first, contact_forces.second);
             return clipped * clipped;
           });
  }

  double ctrl_cost_weight, contact_cost_weight, healthy_reward;
  bool terminates;
  std::pair<double, double> healthy_z, contact_forces;
  double noise;
  std::size_t num_skipped;
  double forward_reward_weight = 1.0;
  bool shows_contacts, counts_contacts;
  int main_body;
};

using AntV5 = MujocoEnv<AntTask<5>>;
using AntV4 = MujocoEnv<AntTask<4>>;

ENVFLEET_ENV("mujoco/Ant-v5", AntV5);
ENVFLEET_ENV("mujoco/Ant-v4", AntV4);

}  // namespace envfleet
