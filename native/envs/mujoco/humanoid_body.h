// What Humanoid and HumanoidStandup observe.
#pragma once

#include "envs/mujoco/mujoco_env.h"

namespace envfleet {

/// v4 shows everything, and the world as a body, which v5 leaves out, as it does the forces on the free joint.
struct HumanoidView {
  HumanoidView(const Kwargs& kwargs, int version, bool has_exclusion) {
    if (has_exclusion) num_skipped = kwargs.flag("exclude_current_positions_from_observation", true) ? 2 : 0;
    if (version < 5) return;
    first_body = 1;
    first_force = 6;
    shows_cinert = kwargs.flag("include_cinert_in_observation", true);
    shows_cvel = kwargs.flag("include_cvel_in_observation", true);
    shows_qfrc_actuator = kwargs.flag("include_qfrc_actuator_in_observation", true);
    shows_cfrc_ext = kwargs.flag("include_cfrc_ext_in_observation", true);
  }

  std::size_t size(const Simulation& simulation) const {
    const std::size_t num_bodies = simulation.nbody() - first_body;
    return simulation.nq() - num_skipped + simulation.nv() + num_bodies * (10 * shows_cinert + 6 * shows_cvel) +
           (simulation.nv() - first_force) * shows_qfrc_actuator + num_bodies * 6 * shows_cfrc_ext;
  }

  void observe(const Simulation& simulation, Physics physics, double* out) const {
    const auto append_bodies = [&](Computed array, std::size_t row_size) {
      out = append(physics[array] + row_size * first_body, row_size * (simulation.nbody() - first_body), out);
    };
    out = append(physics.qpos() + num_skipped, simulation.nq() - num_skipped, out);
    out = append(physics.qvel(), simulation.nv(), out);
    if (shows_cinert) append_bodies(Computed::kCinert, 10);
    if (shows_cvel) append_bodies(Computed::kCvel, 6);
    if (shows_qfrc_actuator) {
      out = append(physics[Computed::kQfrcActuator] + first_force, simulation.nv() - first_force, out);
    }
    if (shows_cfrc_ext) append_bodies(Computed::kCfrcExt, 6);
  }

  std::size_t num_skipped = 2;
  std::size_t first_body = 0;
  std::size_t first_force = 0;
  bool shows_cinert = true;
  bool shows_cvel = true;
  bool shows_qfrc_actuator = true;
  bool shows_cfrc_ext = true;
};

}  // namespace envfleet
