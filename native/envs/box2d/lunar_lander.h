// LunarLander: Gymnasium's, without the particles of its engines, which are only drawn.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <optional>
#include <stdexcept>

#include "envs/box2d/box2d_env.h"

namespace envfleet {

struct LunarLanderModel {
  explicit LunarLanderModel(const Kwargs& kwargs)
      : continuous(kwargs.flag("continuous", false)),
        gravity(kwargs.number("gravity", -10.0)),
        enable_wind(kwargs.flag("enable_wind", false)),
        wind_power(kwargs.number("wind_power", 15.0)),
        turbulence_power(kwargs.number("turbulence_power", 1.5)) {
    if (!(gravity > -12.0 && gravity < 0.0)) throw std::invalid_argument("'gravity' must be between -12 and 0");
    // Box2D ends the program when its numbers overflow.
    for (const double power : {wind_power, turbulence_power}) {
      if (!(std::abs(power) <= 1e6)) throw std::invalid_argument("wind and turbulence must be at most 1e6");
    }
    prepare_box2d();
  }

  Spec spec() const {
    const double turn = 2 * std::numbers::pi;
    return {.observation = Space::box<float>({8}, {-2.5, -2.5, -10, -10, -turn, -10, -0.0, -0.0},
                                             {2.5, 2.5, 10, 10, turn, 10, 1, 1}),
            .action = continuous ? Space::box<float>({2}, {-1}, {1}) : Space::discrete(4)};
  }

  Settings settings() const {
    return {static_cast<double>(continuous), gravity, static_cast<double>(enable_wind), wind_power, turbulence_power};
  }

  bool continuous;
  double gravity;
  bool enable_wind;
  double wind_power, turbulence_power;
};

class LunarLanderTask {
 public:
  using Model = LunarLanderModel;
  using Command = std::array<float, 2>;  // continuous: the action; else its number, and 0

  /// Where the lander was before each of the last steps: there the twin makes the particles that are still to be seen.
  static constexpr std::size_t kTrailLength = 8;
  struct Trail {
    float x, y, angle;
  };
  using Shown = std::array<double, 3 * 6 + 4 + 2 + 3 * kTrailLength>;

  static constexpr std::size_t max_draws(std::size_t num_steps) { return kNumHeights + 2 + 2 + 2 * (num_steps + 1); }

  static Command command(const Model& model, Action action) {
    if (model.continuous) return {action.leaf<float>()[0], action.leaf<float>()[1]};
    return {static_cast<float>(action.discrete()), 0.0f};
  }

  void begin(const Model& model, Stage& stage, Draws& draws) {
    stage.clear(vec(0, model.gravity));
    b2World& world = *stage.world;
    shaping_.reset();
    num_steps_ = 0;
    add_moon(world, draws);

    const double x = kW / 2, y = kH;
    lander_ = add_part(world, {Role::kHull, 0x0010, 5.0f, 0.1f},
                       polygon({{-14 / kScale, 17 / kScale},
                                {-17 / kScale, 0 / kScale},
                                {-17 / kScale, -10 / kScale},
                                {17 / kScale, -10 / kScale},
                                {17 / kScale, 0 / kScale},
                                {14 / kScale, 17 / kScale}}),
                       vec(x, y), 0.0f);
    const double push_x = draws.uniform(-kInitialPush, kInitialPush);
    const double push_y = draws.uniform(-kInitialPush, kInitialPush);
    lander_->ApplyForceToCenter(vec(push_x, push_y), true);
    if (model.enable_wind) {
      wind_index_ = draws.integers(-9999, 9999);
      torque_index_ = draws.integers(-9999, 9999);
    }
    for (const int side : {-1, +1}) {
      b2Body* leg = add_part(world, {side < 0 ? Role::kFirstFoot : Role::kSecondFoot, 0x0020, 1.0f},
                             box(kLegW / kScale, kLegH / kScale), vec(x - side * kLegAway / kScale, y),
                             static_cast<float>(side * 0.05));
      joints_[side < 0 ? 0 : 1] = add_hinge(world, {.a = lander_,
                                                    .b = leg,
                                                    .anchor_a = vec(0, 0),
                                                    .anchor_b = vec(side * kLegAway / kScale, kLegDown / kScale),
                                                    .torque = kLegSpringTorque,
                                                    .speed = 0.3 * side,
                                                    .lower = side < 0 ? 0.9 - 0.5 : -0.9,
                                                    .upper = side < 0 ? 0.9 : -0.9 + 0.5});
      legs_[side < 0 ? 0 : 1] = leg;
    }
    step(model, stage, {0.0f, 0.0f}, draws);
    num_steps_ = 0;
  }

  Outcome step(const Model& model, Stage& stage, const Command& command, Draws& draws) {
    trail_[num_steps_++ % kTrailLength] = {lander_->GetPosition().x, lander_->GetPosition().y, lander_->GetAngle()};
    if (model.enable_wind && !stage.touch.is_down(0) && !stage.touch.is_down(1)) blow(model);
    const Thrust thrust = thrust_of(model, command);
    fire(thrust, draws);
    for (b2RevoluteJoint* joint : joints_) limit_as_before(joint);
    // On the ground Box2D 2.4 needs more iterations to come as close as 2.3 does: with as many, the legs are softer.
    const int num_iterations = is_anything_touched(*stage.world) ? 3 * kVelocityIterations : kVelocityIterations;
    stage.world->Step(static_cast<float>(1.0 / kFramesPerS), num_iterations, kPositionIterations);
    return judge(stage, thrust);
  }

  const std::array<float, 8>& observation() const { return observation_; }

  Shown shown(const Stage& stage) const {
    Shown shown{};
    double* out = shown.data();
    for (const b2Body* body : {lander_, legs_[0], legs_[1]}) {
      const b2Vec2 position = body->GetPosition(), velocity = body->GetLinearVelocity();
      for (const float number : {position.x, position.y, body->GetAngle()}) *out++ = number;
      for (const float number : {velocity.x, velocity.y, body->GetAngularVelocity()}) *out++ = number;
    }
    for (const std::size_t leg : {0, 1}) *out++ = stage.touch.is_down(leg);
    *out++ = stage.touch.has_crashed();
    *out++ = shaping_.value_or(0.0);
    *out++ = static_cast<double>(wind_index_);
    *out++ = static_cast<double>(torque_index_);
    // The last steps, oldest first; fewer than kTrailLength at the beginning.
    const std::size_t num_trails = std::min(num_steps_, kTrailLength);
    for (std::size_t i = num_steps_ - num_trails; i < num_steps_; ++i) {
      const Trail& trail = trail_[i % kTrailLength];
      for (const float number : {trail.x, trail.y, trail.angle}) *out++ = number;
    }
    return shown;
  }

 private:
  static constexpr double kW = kViewportW / kScale;
  static constexpr double kH = kViewportH / kScale;
  static constexpr double kHelipadY = kH / 4;
  static constexpr int kNumChunks = 11;
  static constexpr std::size_t kNumHeights = kNumChunks + 1;
  static constexpr double kInitialPush = 1000.0;
  static constexpr double kMainEnginePower = 13.0;
  static constexpr double kSideEnginePower = 0.6;
  static constexpr double kMainEngineY = 4;
  static constexpr double kSideEngineHeight = 14;
  static constexpr double kSideEngineAway = 12;
  static constexpr double kLegAway = 20;
  static constexpr double kLegDown = 18;
  static constexpr double kLegW = 2;
  static constexpr double kLegH = 8;
  static constexpr double kLegSpringTorque = 40;

  /// Which engines fire, and how strongly.
  struct Thrust {
    double main = 0.0;  // 0: not; 0.5 to 1
    double side = 0.0;  // likewise
    double direction = 0.0;
  };

  static void add_moon(b2World& world, Draws& draws) {
    std::array<double, kNumHeights> height;
    for (double& each : height) each = draws.uniform(0, kH / 2);
    for (int i = kNumChunks / 2 - 2; i <= kNumChunks / 2 + 2; ++i) height[static_cast<std::size_t>(i)] = kHelipadY;
    std::array<b2Vec2, kNumChunks> surface;
    for (std::size_t i = 0; i < kNumChunks; ++i) {
      const double left = height[i == 0 ? kNumHeights - 1 : i - 1];  // Python's height[-1]
      surface[i] = vec(kW / (kNumChunks - 1) * static_cast<double>(i), 0.33 * (left + height[i] + height[i + 1]));
    }
    b2BodyDef body_def;
    b2Body* moon = world.CreateBody(&body_def);
    add_ground(moon, edge(vec(0, 0), vec(kW, 0)), 0.2f);
    for (std::size_t i = 0; i + 1 < kNumChunks; ++i) add_ground(moon, edge(surface[i], surface[i + 1]), 0.1f);
  }

  /// tanh(sin(2 k x) + sin(pi k x)) with k = 0.01 is never periodic.
  static double gust(std::int64_t index) {
    const auto x = static_cast<double>(index);
    return std::tanh(std::sin(0.02 * x) + std::sin(std::numbers::pi * 0.01 * x));
  }
  void blow(const Model& model) {
    lander_->ApplyForceToCenter(vec(gust(wind_index_++) * model.wind_power, 0.0), true);
    lander_->ApplyTorque(static_cast<float>(gust(torque_index_++) * model.turbulence_power), true);
  }

  static Thrust thrust_of(const Model& model, const Command& command) {
    Thrust thrust;
    if (!model.continuous) {
      const auto action = static_cast<int>(command[0]);
      if (action == 2) thrust.main = 1.0;
      if (action == 1 || action == 3) thrust = {.side = 1.0, .direction = action - 2.0};
      return thrust;
    }
    const double main = std::clamp<double>(command[0], -1.0, 1.0);
    const double side = std::clamp<double>(command[1], -1.0, 1.0);
    if (main > 0.0) thrust.main = (main + 1.0) * 0.5;
    if (std::abs(side) > 0.5) {
      thrust.side = std::abs(side);
      thrust.direction = side > 0 ? 1.0 : -1.0;
    }
    return thrust;
  }

  void fire(const Thrust& thrust, Draws& draws) {
    const double dispersion[] = {draws.uniform(-1.0, 1.0) / kScale, draws.uniform(-1.0, 1.0) / kScale};
    if (thrust.main == 0.0 && thrust.side == 0.0) return;
    const double angle = lander_->GetAngle();
    const double tip[] = {std::sin(angle), std::cos(angle)};
    const double side[] = {-tip[1], tip[0]};
    const double x = lander_->GetPosition().x, y = lander_->GetPosition().y;
    if (thrust.main > 0.0) {
      const double along = kMainEngineY / kScale + 2 * dispersion[0];
      const double ox = tip[0] * along + side[0] * dispersion[1];
      const double oy = -tip[1] * along - side[1] * dispersion[1];
      lander_->ApplyLinearImpulse(vec(-ox * kMainEnginePower * thrust.main, -oy * kMainEnginePower * thrust.main),
                                  vec(x + ox, y + oy), true);
    }
    if (thrust.side > 0.0) {
      const double across = 3 * dispersion[1] + thrust.direction * kSideEngineAway / kScale;
      const double ox = tip[0] * dispersion[0] + side[0] * across;
      const double oy = -tip[1] * dispersion[0] - side[1] * across;
      // 17, not kSideEngineHeight: so it is in Gymnasium.
      const b2Vec2 place = vec(x + ox - tip[0] * 17 / kScale, y + oy + tip[1] * kSideEngineHeight / kScale);
      lander_->ApplyLinearImpulse(vec(-ox * kSideEnginePower * thrust.side, -oy * kSideEnginePower * thrust.side),
                                  place, true);
    }
  }

  Outcome judge(const Stage& stage, const Thrust& thrust) {
    const b2Vec2 position = lander_->GetPosition(), velocity = lander_->GetLinearVelocity();
    const double state[] = {(position.x - kW / 2) / (kW / 2),
                            (position.y - (kHelipadY + kLegDown / kScale)) / (kH / 2),
                            velocity.x * (kW / 2) / kFramesPerS,
                            velocity.y * (kH / 2) / kFramesPerS,
                            lander_->GetAngle(),
                            20.0 * lander_->GetAngularVelocity() / kFramesPerS,
                            stage.touch.is_down(0) ? 1.0 : 0.0,
                            stage.touch.is_down(1) ? 1.0 : 0.0};
    for (std::size_t i = 0; i < 8; ++i) observation_[i] = static_cast<float>(state[i]);

    const double shaping = -100 * std::sqrt(state[0] * state[0] + state[1] * state[1]) -
                           100 * std::sqrt(state[2] * state[2] + state[3] * state[3]) - 100 * std::abs(state[4]) +
                           10 * state[6] + 10 * state[7];
    Outcome outcome;
    if (shaping_) outcome.reward = shaping - *shaping_;
    shaping_ = shaping;
    outcome.reward -= thrust.main * 0.30;
    outcome.reward -= thrust.side * 0.03;
    if (stage.touch.has_crashed() || std::abs(state[0]) >= 1.0) outcome = {.reward = -100.0, .terminated = true};
    if (!lander_->IsAwake()) outcome = {.reward = 100.0, .terminated = true};
    return outcome;
  }

  b2Body* lander_ = nullptr;
  std::array<b2Body*, 2> legs_{};
  std::array<b2RevoluteJoint*, 2> joints_{};
  std::int64_t wind_index_ = 0, torque_index_ = 0;
  std::optional<double> shaping_;  // of the last step
  std::array<float, 8> observation_{};
  std::array<Trail, kTrailLength> trail_{};
  std::size_t num_steps_ = 0;
};

using LunarLander = Box2dEnv<LunarLanderTask>;
ENVFLEET_ENV("box2d/LunarLander", LunarLander);

}  // namespace envfleet
