// CartPole: Gymnasium's, in the same arithmetic.
#pragma once

#include <cmath>
#include <numbers>

#include "engine/registry.h"
#include "envs/classic_control/reset_bounds.h"

namespace envfleet {

struct CartPole {
  struct Model {
    explicit Model(const Kwargs& kwargs) : sutton_barto_reward(kwargs.flag("sutton_barto_reward", false)) {}

    static Spec spec() {
      const std::vector<double> high{2 * kMaxX, kInfinity, 2 * kMaxTheta, kInfinity};
      const std::vector<double> low{-high[0], -high[1], -high[2], -high[3]};
      return {.observation = Space::box<float>({4}, low, high), .action = Space::discrete(2)};
    }

    bool sutton_barto_reward;
  };

  struct State {
    double x, x_dot, theta, theta_dot;
  };

  explicit CartPole(const Model& shared) : model(&shared) {}

  void reset(Random& random, const Kwargs& options) {
    const auto [low, high] = reset_bounds(options, -0.05, 0.05);
    for (double* value : {&state.x, &state.x_dot, &state.theta, &state.theta_dot}) *value = random.uniform(low, high);
  }

  Outcome step(Action action, Random&) {
    const auto [x, x_dot, theta, theta_dot] = state;
    const double force =
        kForce * static_cast<double>(2 * action.discrete() - 1);  // no branch: actions are unforeseeable
    const double cos_theta = std::cos(theta);
    const double sin_theta = std::sin(theta);
    const double push = (force + kPoleMassLength * (theta_dot * theta_dot) * sin_theta) / kTotalMass;
    const double theta_acc = (kGravity * sin_theta - cos_theta * push) /
                             (kLength * (4.0 / 3.0 - kPoleMass * (cos_theta * cos_theta) / kTotalMass));
    const double x_acc = push - kPoleMassLength * theta_acc * cos_theta / kTotalMass;
    state = {x + kTau * x_dot, x_dot + kTau * x_acc, theta + kTau * theta_dot, theta_dot + kTau * theta_acc};
    const bool fell = state.x < -kMaxX || state.x > kMaxX || state.theta < -kMaxTheta || state.theta > kMaxTheta;
    if (model->sutton_barto_reward) return {.reward = fell ? -1.0 : 0.0, .terminated = fell};
    return {.reward = 1.0, .terminated = fell};
  }

  void observe(Obs obs) const {
    float* out = obs.leaf<float>();
    out[0] = static_cast<float>(state.x);
    out[1] = static_cast<float>(state.x_dot);
    out[2] = static_cast<float>(state.theta);
    out[3] = static_cast<float>(state.theta_dot);
  }

  static constexpr double kGravity = 9.8;
  static constexpr double kPoleMass = 0.1;
  static constexpr double kTotalMass = kPoleMass + 1.0;
  static constexpr double kLength = 0.5;  // half the pole's
  static constexpr double kPoleMassLength = kPoleMass * kLength;
  static constexpr double kForce = 10.0;
  static constexpr double kTau = 0.02;  // seconds between two states
  static constexpr double kMaxX = 2.4;
  static constexpr double kMaxTheta = 12 * 2 * std::numbers::pi / 360;

  const Model* model;
  State state{};
};

ENVFLEET_ENV("CartPole", CartPole);

}  // namespace envfleet
