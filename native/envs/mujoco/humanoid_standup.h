// HumanoidStandup: Gymnasium's, in the same arithmetic.
#pragma once

#include "envs/mujoco/humanoid_body.h"

namespace envfleet {

template <int kVersion>
struct HumanoidStandupTask : MujocoTask {
  explicit HumanoidStandupTask(const Kwargs& kwargs)
      : MujocoTask(kwargs, kVersion, 5), view(kwargs, kVersion, kVersion >= 5) {
    if constexpr (kVersion >= 5) {
      kwargs.number("uph_cost_weight", 1);  // Gymnasium takes it, and makes nothing of it
      ctrl_cost_weight = kwargs.number("ctrl_cost_weight", 0.1);
      impact_cost_weight = kwargs.number("impact_cost_weight", 5e-7);
      impact_costs = range(kwargs, "impact_cost_range", -kInfinity, 10.0);
      noise = noise_scale(kwargs, 1e-2);
    }
    require(simulation.nq() >= 7 && simulation.nv() >= 6, "a free joint");
  }

  TaskInfos infos() const {
    const std::vector<TaskInfo> rewards = {{"reward_linup"}, {"reward_quadctrl"}, {"reward_impact"}};
    if constexpr (kVersion < 5) return {.of_steps = rewards};
    return {.always = {{"x_position"},
                       {"y_position"},
                       {"z_distance_from_origin"},
                       {"tendon_length", Dtype::kFloat64, Computed::kTenLength},
                       {"tendon_velocity", Dtype::kFloat64, Computed::kTenVelocity}},
            .of_steps = rewards};
  }

  void draw_start(Random& random, double* qpos, double* qvel) const {
    add_uniform(random, noise, qpos, simulation.nq());
    add_uniform(random, noise, qvel, simulation.nv());
  }

  void note_reset(Physics physics, double* notes) const {
    const double* qpos = physics.qpos();
    if constexpr (kVersion >= 5) note(notes, {qpos[0], qpos[1], qpos[2] - simulation.model().qpos0[2]});
  }

  struct Before {};
  Before before(Physics) const { return {}; }

  Outcome judge(Before, Physics physics, const float*, double* notes) const {
    const double up = physics.qpos()[2] / simulation.model().opt.timestep;
    const double ctrl_cost = ctrl_cost_weight * numpy_sum_of_squares(physics.ctrl(), simulation.nu());
    const double impact_cost = numpy_clip(
        impact_cost_weight * numpy_sum_of_squares(physics[Computed::kCfrcExt], simulation.size(Computed::kCfrcExt)),
        impact_costs.first, impact_costs.second);
    note_reset(physics, notes);
    note(notes + (kVersion >= 5 ? 3 : 0), {up, -ctrl_cost, -impact_cost});
    return {.reward = up - ctrl_cost - impact_cost + 1};
  }

  std::size_t obs_size() const { return view.size(simulation); }
  void observe(Physics physics, double* out) const { view.observe(simulation, physics, out); }

 private:
  double ctrl_cost_weight = 0.1;
  double impact_cost_weight = 5e-7;
  std::pair<double, double> impact_costs{-kInfinity, 10.0};
  double noise = 0.01;
  HumanoidView view;
};

using HumanoidStandupV5 = MujocoEnv<HumanoidStandupTask<5>>;
using HumanoidStandupV4 = MujocoEnv<HumanoidStandupTask<4>>;

ENVFLEET_ENV("mujoco/HumanoidStandup-v5", HumanoidStandupV5);
ENVFLEET_ENV("mujoco/HumanoidStandup-v4", HumanoidStandupV4);

}  // namespace envfleet
