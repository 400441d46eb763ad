// The library envfleet/libenvfleet_mujoco-VERSION.so: loaded only where MuJoCo is, and the very version that it was
// compiled with.
#include "envs/mujoco/ant.h"
#include "envs/mujoco/half_cheetah.h"
#include "envs/mujoco/humanoid.h"
#include "envs/mujoco/humanoid_standup.h"
#include "envs/mujoco/inverted_double_pendulum.h"
#include "envs/mujoco/inverted_pendulum.h"
#include "envs/mujoco/planar_walkers.h"
#include "envs/mujoco/pusher.h"
#include "envs/mujoco/reacher.h"
#include "envs/mujoco/swimmer.h"

namespace envfleet {
const MujocoClock kMujocoClock;
}

ENVFLEET_PLUGIN();

/// Who is told of MuJoCo's warnings; null: nobody. Called by envfleet.pool.simulators.mujoco.
extern "C" __attribute__((visibility("default"))) void envfleet_mujoco_report_to(envfleet::MujocoReport report) {
  envfleet::MujocoWarnings& warnings = envfleet::mujoco_warnings();
  const std::lock_guard lock(warnings.mutex);
  warnings.report = report;
}

/// Does MuJoCo write what it has to say into a file, where it has no other handler? Returns what was so before.
extern "C" __attribute__((visibility("default"))) bool envfleet_mujoco_log_to_file(bool is_wanted) {
  mjLogConfig config = mju_getLogConfig();
  const bool before = config.logto_file;
  config.logto_file = is_wanted;
  mju_setLogConfig(config);
  return before;
}
