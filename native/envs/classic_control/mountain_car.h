// MountainCar: Gymnasium's, in the same arithmetic.
#pragma once

#include <algorithm>
#include <cmath>

#include "engine/registry.h"
#include "envs/classic_control/valley.h"

namespace envfleet {

struct MountainCar : Valley {
  struct Model {
    explicit Model(const Kwargs& kwargs) : goal_velocity(kwargs.number("goal_velocity", 0.0)) {}

    static Spec spec() { return {.observation = observation_space(), .action = Space::discrete(3)}; }

    double goal_velocity;
  };

  struct State {
    double position, velocity;
  };

  explicit MountainCar(const Model& shared) : model(&shared) {}

  void reset(Random& random, const Kwargs& options) { state = {start(random, options), 0.0}; }

  Outcome step(Action action, Random&) {
    auto [position, velocity] = state;
    const auto direction = static_cast<double>(action.discrete() - 1);
    velocity += direction * kForce + std::cos(3 * position) * -kGravity;
    velocity = std::clamp(velocity, -kMaxSpeed, kMaxSpeed);
    position = std::clamp(position + velocity, kMinPosition, kMaxPosition);
    if (position == kMinPosition && velocity < 0) velocity = 0.0;
    state = {position, velocity};
    return {.reward = -1.0, .terminated = position >= kGoalPosition && velocity >= model->goal_velocity};
  }

  void observe(Obs obs) const { show(state.position, state.velocity, obs); }

  static constexpr double kGoalPosition = 0.5;
  static constexpr double kForce = 0.001;

  const Model* model;
  State state{};
};

ENVFLEET_ENV("MountainCar", MountainCar);

}  // namespace envfleet
