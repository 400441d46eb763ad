// MountainCarContinuous: Gymnasium's, in the same arithmetic.
#pragma once

#include <cmath>

#include "engine/registry.h"
#include "envs/classic_control/valley.h"

namespace envfleet {

struct MountainCarContinuous : Valley {
  struct Model {
    explicit Model(const Kwargs& kwargs) : goal_velocity(kwargs.number("goal_velocity", 0.0)) {}

    static Spec spec() { return {.observation = observation_space(), .action = Space::box<float>({1}, {-1.0}, {1.0})}; }

    double goal_velocity;
  };

  struct State {
    double position, velocity;
    bool is_float32;  // Gymnasium's state is float64 after reset(), float32 after every step
  };

  explicit MountainCarContinuous(const Model& shared) : model(&shared) {}

  void reset(Random& random, const Kwargs& options) { state = {start(random, options), 0.0, false}; }

  Outcome step(Action action, Random&) {
    const float wanted = *action.leaf<float>();
    const bool at_goal = state.is_float32 ? move<float>(wanted) : move<double>(wanted);
    const double effort = static_cast<double>(wanted) * static_cast<double>(wanted);  // exact, as math.pow() of it
    return {.reward = (at_goal ? 100.0 : 0.0) - effort * 0.1, .terminated = at_goal};
  }

  void observe(Obs obs) const { show(state.position, state.velocity, obs); }

  static constexpr double kGoalPosition = 0.45;
  static constexpr double kPower = 0.0015;

  const Model* model;
  State state{};

 private:
  /// Move the car; true if it is at the goal. NumPy computes in `Real`, the type of the state, and rounds Python's
  /// floats to it, also those of comparisons.
  template <class Real>
  bool move(float wanted) {
    auto position = static_cast<Real>(state.position);
    auto velocity = static_cast<Real>(state.velocity);
    const double slope = kGravity * std::cos(static_cast<double>(3 * position));
    velocity += static_cast<Real>(acceleration(wanted, slope));
    // A velocity that meets a limit becomes a Python float, which is compared with the goal's as it is.
    bool has_limit = false;
    double limit = 0.0;
    const auto set_velocity = [&](double python_float) {
      has_limit = true;
      limit = python_float;
      velocity = static_cast<Real>(python_float);
    };
    if (velocity > static_cast<Real>(kMaxSpeed)) set_velocity(kMaxSpeed);
    if (velocity < static_cast<Real>(-kMaxSpeed)) set_velocity(-kMaxSpeed);
    position += velocity;
    if (position > static_cast<Real>(kMaxPosition)) position = static_cast<Real>(kMaxPosition);
    if (position < static_cast<Real>(kMinPosition)) position = static_cast<Real>(kMinPosition);
    if (position == static_cast<Real>(kMinPosition) && velocity < 0) set_velocity(0.0);
    state = {static_cast<float>(position), static_cast<float>(velocity), true};
    if (position < static_cast<Real>(kGoalPosition)) return false;
    return has_limit ? limit >= model->goal_velocity : velocity >= static_cast<Real>(model->goal_velocity);
  }

  /// An action beyond the limits is replaced by a Python float, and all is double; else all is float.
  static double acceleration(float wanted, double slope) {
    if (wanted < -1.0f) return -1.0 * kPower - slope;
    if (wanted > 1.0f) return 1.0 * kPower - slope;
    return wanted * static_cast<float>(kPower) - static_cast<float>(slope);
  }
};

ENVFLEET_ENV("MountainCarContinuous", MountainCarContinuous);

}  // namespace envfleet
