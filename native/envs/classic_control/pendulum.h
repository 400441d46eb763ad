// Pendulum: Gymnasium's, in the same arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>

#include "engine/registry.h"
#include "envs/python_math.h"

namespace envfleet {

struct Pendulum {
  struct Model {
    explicit Model(const Kwargs& kwargs) : gravity_torque(3 * kwargs.number("g", 10.0) / 2.0) {}

    static Spec spec() {
      return {.observation = Space::box<float>({3}, {-1.0, -1.0, -kMaxSpeed}, {1.0, 1.0, kMaxSpeed}),
              .action = Space::box<float>({1}, {-kMaxTorque}, {kMaxTorque})};
    }

    double gravity_torque;  // 3 g / (2 l)
  };

  struct State {
    double theta, theta_dot;
    float last_torque;
    bool has_torque;  // false until the first step: Gymnasium's last_u is None
  };

  explicit Pendulum(const Model& shared) : model(&shared) {}

  void reset(Random& random, const Kwargs& options) {
    const double max_theta = options.number("x_init", std::numbers::pi);
    const double max_theta_dot = options.number("y_init", 1.0);
    for (const double bound : {max_theta, max_theta_dot}) {
      if (bound >= 0 && std::isfinite(2 * bound)) continue;
      throw std::invalid_argument("the reset options 'x_init' and 'y_init' must be finite and not negative");
    }
    const double theta = random.uniform(-max_theta, max_theta);
    const double theta_dot = random.uniform(-max_theta_dot, max_theta_dot);
    state = {theta, theta_dot, 0.0f, false};
  }

  Outcome step(Action action, Random&) {
    const double theta = state.theta;
    const auto max_torque = static_cast<float>(kMaxTorque);
    // Terms with nothing but the torque are float32, as the action is.
    const float torque = std::clamp(*action.leaf<float>(), -max_torque, max_torque);
    const double cost =
        python_square(normalized(theta)) + 0.1 * python_square(state.theta_dot) + 0.001f * python_square(torque);
    double theta_dot = state.theta_dot + (model->gravity_torque * std::sin(theta) + 3.0f * torque) * kTau;
    theta_dot = std::clamp(theta_dot, -kMaxSpeed, kMaxSpeed);
    state = {theta + theta_dot * kTau, theta_dot, torque, true};
    return {.reward = -cost};
  }

  void observe(Obs obs) const {
    float* out = obs.leaf<float>();
    out[0] = static_cast<float>(std::cos(state.theta));
    out[1] = static_cast<float>(std::sin(state.theta));
    out[2] = static_cast<float>(state.theta_dot);
  }

  static constexpr double kMaxSpeed = 8.0;
  static constexpr double kMaxTorque = 2.0;
  static constexpr double kTau = 0.05;  // seconds between two states

  const Model* model;
  State state{};

 private:
  /// The same angle between -pi and pi.
  static double normalized(double theta) {
    return python_modulo(theta + std::numbers::pi, 2 * std::numbers::pi) - std::numbers::pi;
  }
};

ENVFLEET_ENV("Pendulum", Pendulum);

}  // namespace envfleet
