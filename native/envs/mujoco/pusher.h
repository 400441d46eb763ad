// Pusher: Gymnasium's, in the same arithmetic. Its v4 is not made for this version of MuJoCo.
#pragma once

#include <algorithm>

#include "envs/mujoco/mujoco_env.h"

namespace envfleet {

struct PusherTask : MujocoTask {
  explicit PusherTask(const Kwargs& kwargs)
      : MujocoTask(kwargs, 5, 5),
        near_weight(kwargs.number("reward_near_weight", 0.5)),
        dist_weight(kwargs.number("reward_dist_weight", 1)),
        control_weight(kwargs.number("reward_control_weight", 0.1)),
        arm(body("tips_arm")),
        object(body("object")),
        goal(body("goal")) {
    require(simulation.nq() >= 7 && simulation.nv() >= 7, "at least seven coordinates");
  }

  TaskInfos infos() const { return {.of_steps = {{"reward_dist"}, {"reward_ctrl", Dtype::kFloat32}, {"reward_near"}}}; }

  void draw_start(Random& random, double* qpos, double* qvel) const {
    double* cylinder = qpos + simulation.nq() - 4;
    do {
      cylinder[0] = random.uniform(-0.3, 0.0);
      cylinder[1] = random.uniform(-0.2, 0.2);
    } while (numpy_norm(cylinder, 2) <= 0.17);
    cylinder[2] = cylinder[3] = 0.0;  // the goal
    add_uniform(random, 0.005, qvel, simulation.nv());
    std::fill_n(qvel + simulation.nv() - 4, 4, 0.0);
  }

  void note_reset(Physics, double*) const {}

  struct Before {};
  Before before(Physics) const { return {}; }

  Outcome judge(Before, Physics physics, const float* action, double* notes) const {
    const double near = -distance(physics, arm) * near_weight;
    const double dist = -distance(physics, goal) * dist_weight;
    const float ctrl = -numpy_sum_of_squares(action, simulation.nu()) * static_cast<float>(control_weight);
    note(notes, {dist, ctrl, near});
    return {.reward = dist + ctrl + near};
  }

  std::size_t obs_size() const { return 23; }

  void observe(Physics physics, double* out) const {
    out = append(physics.qpos(), 7, out);
    out = append(physics.qvel(), 7, out);
    for (const int each : {arm, object, goal}) out = append(physics.xpos(each), 3, out);
  }

 private:
  double distance(Physics physics, int from_object) const {
    double apart[3];
    for (int i = 0; i < 3; ++i) apart[i] = physics.xpos(object)[i] - physics.xpos(from_object)[i];
    return numpy_norm(apart, 3);
  }

  double near_weight, dist_weight, control_weight;
  int arm, object, goal;
};

using PusherV5 = MujocoEnv<PusherTask>;

ENVFLEET_ENV("mujoco/Pusher-v5", PusherV5);

}  // namespace envfleet
