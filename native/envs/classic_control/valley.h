// The valley that both mountain cars drive in.
#pragma once

#include "engine/env.h"
#include "envs/classic_control/reset_bounds.h"

namespace envfleet {

struct Valley {
  static Space observation_space() {
    return Space::box<float>({2}, {kMinPosition, -kMaxSpeed}, {kMaxPosition, kMaxSpeed});
  }

  static double start(Random& random, const Kwargs& options) {
    const auto [low, high] = reset_bounds(options, -0.6, -0.4);
    return random.uniform(low, high);
  }

  static void show(double position, double velocity, Obs obs) {
    float* out = obs.leaf<float>();
    out[0] = static_cast<float>(position);
    out[1] = static_cast<float>(velocity);
  }

  static constexpr double kMinPosition = -1.2;
  static constexpr double kMaxPosition = 0.6;
  static constexpr double kMaxSpeed = 0.07;
  static constexpr double kGravity = 0.0025;
};

}  // namespace envfleet
