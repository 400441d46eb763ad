// Acrobot: Gymnasium's, with the equations of Sutton and Barto's book, in the same arithmetic.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <stdexcept>

#include "engine/registry.h"
#include "envs/classic_control/reset_bounds.h"
#include "envs/python_math.h"

namespace envfleet {

/// Both links have mass 1, length 1, moment of inertia 1 and their centre of mass in the middle.
struct Acrobot {
  struct Model {
    explicit Model(const Kwargs&) {}

    static Spec spec() {
      const std::vector<double> high{1.0, 1.0, 1.0, 1.0, kMaxSpeed1, kMaxSpeed2};
      std::vector<double> low = high;
      for (double& bound : low) bound = -bound;
      return {.observation = Space::box<float>({6}, low, high), .action = Space::discrete(3)};
    }
  };

  struct State {
    double theta1, theta2, theta1_dot, theta2_dot;
    double cos1, sin1, cos2, sin2;  // of the two angles: for the observation, and for the next step
    bool is_float32;                // Gymnasium's state is float32 after reset(), float64 after every step
  };

  explicit Acrobot(const Model&) {}

  void reset(Random& random, const Kwargs& options) {
    const auto [low, high] = reset_bounds(options, -0.1, 0.1);
    Vector start;
    for (double& value : start) value = static_cast<float>(random.uniform(low, high));
    settle(start, true);
  }

  Outcome step(Action action, Random&) {
    const auto torque = static_cast<double>(action.discrete() - 1);
    const Vector next = integrate(torque);
    settle({wrapped(next[0]), wrapped(next[1]), std::clamp(next[2], -kMaxSpeed1, kMaxSpeed1),
            std::clamp(next[3], -kMaxSpeed2, kMaxSpeed2)},
           false);
    const bool is_high = -state.cos1 - std::cos(state.theta2 + state.theta1) > 1.0;
    return {.reward = is_high ? 0.0 : -1.0, .terminated = is_high};
  }

  /// Right after reset() NumPy computes these sines in float32: they may differ from ours in the last bit.
  void observe(Obs obs) const {
    float* out = obs.leaf<float>();
    out[0] = static_cast<float>(state.cos1);
    out[1] = static_cast<float>(state.sin1);
    out[2] = static_cast<float>(state.cos2);
    out[3] = static_cast<float>(state.sin2);
    out[4] = static_cast<float>(state.theta1_dot);
    out[5] = static_cast<float>(state.theta2_dot);
  }

  static constexpr double kMaxSpeed1 = 4 * std::numbers::pi;
  static constexpr double kMaxSpeed2 = 9 * std::numbers::pi;
  static constexpr double kGravity = 9.8;
  static constexpr double kTau = 0.2;  // seconds between two states

  State state{};

 private:
  using Vector = std::array<double, 4>;

  void settle(const Vector& at, bool is_float32) {
    const auto [theta1, theta2, theta1_dot, theta2_dot] = at;
    state = {theta1,           theta2,           theta1_dot,       theta2_dot, std::cos(theta1),
             std::sin(theta1), std::cos(theta2), std::sin(theta2), is_float32};
  }

  static Vector derivative(const Vector& at, double torque) {
    return derivative(at, std::cos(at[1]), std::sin(at[1]), torque);
  }
  static Vector derivative(const Vector& at, double cos2, double sin2, double torque) {
    const auto [theta1, theta2, theta1_dot, theta2_dot] = at;
    const double d1 = 0.25 + (1.25 + cos2) + 1.0 + 1.0;
    const double d2 = 0.25 + 0.5 * cos2 + 1.0;
    const double phi2 = 0.5 * kGravity * std::cos(theta1 + theta2 - std::numbers::pi / 2);
    const double phi1 = -0.5 * python_square(theta2_dot) * sin2 - theta2_dot * theta1_dot * sin2 +
                        1.5 * kGravity * std::cos(theta1 - std::numbers::pi / 2) + phi2;
    const double theta2_acc =
        (torque + d2 / d1 * phi1 - 0.5 * python_square(theta1_dot) * sin2 - phi2) / (1.25 - python_square(d2) / d1);
    const double theta1_acc = -(d2 * theta2_acc + phi1) / d1;
    return {theta1_dot, theta2_dot, theta1_acc, theta2_acc};
  }

  /// One step of Runge and Kutta's method of fourth order.
  Vector integrate(double torque) const {
    const Vector start{state.theta1, state.theta2, state.theta1_dot, state.theta2_dot};
    const auto moved = [&start](double seconds, const Vector& speed) {
      Vector end;
      for (std::size_t i = 0; i < end.size(); ++i) end[i] = start[i] + seconds * speed[i];
      return end;
    };
    const Vector k1 = derivative(start, state.cos2, state.sin2, torque);
    const Vector k2 = derivative(moved(kTau / 2, k1), torque);
    const Vector k3 = derivative(moved(kTau / 2, k2), torque);
    const Vector k4 = derivative(moved(kTau, k3), torque);
    Vector sum;
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = k1[i] + 2 * k2[i] + 2 * k3[i] + k4[i];
    return moved(kTau / 6, sum);
  }

  /// The same angle between -pi and pi. Turn by turn, as Gymnasium: fmod() would round otherwise.
  static double wrapped(double angle) {
    constexpr double kTurn = 2 * std::numbers::pi;
    // Only the reset options lead there. Gymnasium would turn for hours, or for ever.
    if (std::abs(angle) > 1e6) throw std::domain_error("an angle is beyond 1e6: reset with smaller 'low' and 'high'");
    while (angle > std::numbers::pi) angle -= kTurn;
    while (angle < -std::numbers::pi) angle += kTurn;
    return angle;
  }
};

ENVFLEET_ENV("Acrobot", Acrobot);

}  // namespace envfleet
