// BipedalWalker: Gymnasium's, on grass or (hardcore) with stumps, stairs and pits.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <optional>
#include <utility>
#include <vector>

#include "envs/box2d/bipedal_terrain.h"
#include "envs/box2d/box2d_env.h"

namespace envfleet {

struct BipedalWalkerModel {
  explicit BipedalWalkerModel(const Kwargs& kwargs) : hardcore(kwargs.flag("hardcore", false)) { prepare_box2d(); }

  static Spec spec() {
    const double pi = std::numbers::pi;
    std::vector<double> low{-pi, -5, -5, -5, -pi, -5, -pi, -5, -0.0, -pi, -5, -pi, -5, -0.0};
    std::vector<double> high{pi, 5, 5, 5, pi, 5, pi, 5, 5, pi, 5, pi, 5, 5};
    low.resize(24, -1.0);
    high.resize(24, 1.0);
    return {.observation = Space::box<float>({24}, std::move(low), std::move(high)),
            .action = Space::box<float>({4}, {-1}, {1})};
  }

  Settings settings() const { return {static_cast<double>(hardcore)}; }

  bool hardcore;
};

class BipedalWalkerTask {
 public:
  using Model = BipedalWalkerModel;
  using Command = std::array<float, 4>;  // the action: hip and knee of the first leg, of the second
  static constexpr std::size_t kNumRays = 10;
  using Shown = std::array<double, 5 * 6 + 4 + 3 * kNumRays>;

  static constexpr std::size_t max_draws(std::size_t) {
    return BipedalTerrain::kMaxDraws + kNumClouds * kDrawsOfCloud + 1;
  }

  static Command command(const Model&, Action action) {
    const float* values = action.leaf<float>();
    return {values[0], values[1], values[2], values[3]};
  }

  void begin(const Model& model, Stage& stage, Draws& draws) {
    stage.clear(vec(0, -10));
    b2World& world = *stage.world;
    shaping_.reset();
    BipedalTerrain(world, draws, model.hardcore).add();
    draw_clouds(draws);

    const double x = kTerrainStep * kTerrainStartpad / 2;
    const double y = kTerrainHeight + 2 * kLegH;
    hull_ = add_part(world, {Role::kHull, 0x0020, 5.0f, 0.1f},
                     polygon({{-30 / kScale, 9 / kScale},
                              {6 / kScale, 9 / kScale},
                              {34 / kScale, 1 / kScale},
                              {34 / kScale, -8 / kScale},
                              {-30 / kScale, -8 / kScale}}),
                     vec(x, y), 0.0f);
    hull_->ApplyForceToCenter(vec(draws.uniform(-kInitialPush, kInitialPush), 0), true);
    for (const std::size_t leg : {0, 1}) {
      const double side = leg == 0 ? -1.0 : 1.0;
      const auto angle = static_cast<float>(side * 0.05);
      b2Body* upper = add_part(world, {Role::kNone, 0x0020, 1.0f}, box(kLegW / 2, kLegH / 2),
                               vec(x, y - kLegH / 2 - kLegDown), angle);
      joints_[2 * leg] = add_hinge(world, {.a = hull_,
                                           .b = upper,
                                           .anchor_a = vec(0, kLegDown),
                                           .anchor_b = vec(0, kLegH / 2),
                                           .torque = kMotorsTorque,
                                           .speed = side,
                                           .lower = -0.8,
                                           .upper = 1.1});
      b2Body* lower = add_part(world, {leg == 0 ? Role::kFirstFoot : Role::kSecondFoot, 0x0020, 1.0f},
                               box(0.8 * kLegW / 2, kLegH / 2), vec(x, y - kLegH * 3 / 2 - kLegDown), angle);
      joints_[2 * leg + 1] = add_hinge(world, {.a = upper,
                                               .b = lower,
                                               .anchor_a = vec(0, -kLegH / 2),
                                               .anchor_b = vec(0, kLegH / 2),
                                               .torque = kMotorsTorque,
                                               .speed = 1.0,
                                               .lower = -1.6,
                                               .upper = -0.1});
      legs_[2 * leg] = upper;
      legs_[2 * leg + 1] = lower;
    }
    step(model, stage, {}, draws);
  }

  Outcome step(const Model&, Stage& stage, const Command& command, Draws&) {
    for (std::size_t i = 0; i < joints_.size(); ++i) {
      const float speed = i % 2 == 0 ? kSpeedHip : kSpeedKnee;
      const float sign = command[i] > 0 ? 1.0f : command[i] < 0 ? -1.0f : 0.0f;
      joints_[i]->SetMotorSpeed(speed * sign);
      joints_[i]->SetMaxMotorTorque(kMotorsTorque * effort(command[i]));
      limit_as_before(joints_[i]);
    }
    stage.world->Step(static_cast<float>(1.0 / kFramesPerS), kVelocityIterations, kPositionIterations);
    look(*stage.world);
    observe(stage.touch);
    return judge(stage.touch, command);
  }

  const std::array<float, 24>& observation() const { return observation_; }

  Shown shown(const Stage& stage) const {
    Shown shown{};
    double* out = shown.data();
    for (const b2Body* body : {hull_, legs_[0], legs_[1], legs_[2], legs_[3]}) {
      const b2Vec2 position = body->GetPosition(), velocity = body->GetLinearVelocity();
      for (const float number : {position.x, position.y, body->GetAngle()}) *out++ = number;
      for (const float number : {velocity.x, velocity.y, body->GetAngularVelocity()}) *out++ = number;
    }
    for (const std::size_t foot : {0, 1}) *out++ = stage.touch.is_down(foot);
    *out++ = stage.touch.has_crashed();
    *out++ = shaping_.value_or(0.0);
    for (const Ray& ray : rays_) {
      for (const float number : {ray.end.x, ray.end.y, ray.fraction}) *out++ = number;
    }
    return shown;
  }

 private:
  static constexpr float kMotorsTorque = 80;
  static constexpr float kSpeedHip = 4;
  static constexpr float kSpeedKnee = 6;
  static constexpr double kLidarRange = 160 / kScale;
  static constexpr double kInitialPush = 5;
  static constexpr double kLegDown = -8 / kScale;
  static constexpr double kLegW = 8 / kScale;
  static constexpr double kLegH = 34 / kScale;
  static constexpr std::size_t kNumClouds = kTerrainLength / 20;
  static constexpr std::size_t kDrawsOfCloud = 1 + 5 * 2;

  /// Finds where a ray meets the ground first.
  struct Ray final : b2RayCastCallback {
    float ReportFixture(b2Fixture* fixture, const b2Vec2& point, const b2Vec2&, float at) override {
      if ((fixture->GetFilterData().categoryBits & kGround) == 0) return -1;
      end = point;
      fraction = at;
      return at;
    }
    b2Vec2 end{0, 0};
    float fraction = 1.0f;
  };

  /// They are only drawn, but their numbers are taken from the same generator.
  static void draw_clouds(Draws& draws) {
    for (std::size_t cloud = 0; cloud < kNumClouds; ++cloud) {
      draws.uniform(0, kTerrainLength);
      for (int i = 0; i < 5 * 2; ++i) draws.uniform(0, 5 * kTerrainStep);
    }
  }

  static float effort(float action) { return std::clamp(std::abs(action), 0.0f, 1.0f); }

  void look(b2World& world) {
    const b2Vec2 eye = hull_->GetPosition();
    for (std::size_t i = 0; i < kNumRays; ++i) {
      const double angle = 1.5 * static_cast<double>(i) / 10.0;
      rays_[i].fraction = 1.0f;
      rays_[i].end = vec(eye.x + std::sin(angle) * kLidarRange, eye.y - std::cos(angle) * kLidarRange);
      const b2Vec2 far = rays_[i].end;
      world.RayCast(&rays_[i], eye, far);
    }
  }

  void observe(const TouchSensor& touch) {
    const b2Vec2 velocity = hull_->GetLinearVelocity();
    float* out = observation_.data();
    const auto put = [&](double number) { *out++ = static_cast<float>(number); };
    put(hull_->GetAngle());
    put(2.0 * hull_->GetAngularVelocity() / kFramesPerS);
    put(0.3 * velocity.x * (kViewportW / kScale) / kFramesPerS);
    put(0.3 * velocity.y * (kViewportH / kScale) / kFramesPerS);
    for (const std::size_t leg : {0, 1}) {
      const b2RevoluteJoint& hip = *joints_[2 * leg];
      const b2RevoluteJoint& knee = *joints_[2 * leg + 1];
      put(hip.GetJointAngle());
      put(static_cast<double>(hip.GetJointSpeed()) / kSpeedHip);
      put(knee.GetJointAngle() + 1.0);
      put(static_cast<double>(knee.GetJointSpeed()) / kSpeedKnee);
      put(touch.is_down(leg) ? 1.0 : 0.0);
    }
    for (const Ray& ray : rays_) put(ray.fraction);
  }

  Outcome judge(const TouchSensor& touch, const Command& command) {
    const double x = hull_->GetPosition().x;
    double shaping = 130 * x / kScale;
    shaping -= 5.0 * std::abs(static_cast<double>(hull_->GetAngle()));
    // float: so is what Gymnasium's arithmetic with a float32 action gives.
    auto reward = static_cast<float>(shaping_ ? shaping - *shaping_ : 0.0);
    shaping_ = shaping;
    for (const float action : command) {
      reward -= static_cast<float>(0.00035 * static_cast<double>(kMotorsTorque)) * effort(action);
    }
    Outcome outcome{.reward = reward};
    if (touch.has_crashed() || x < 0) outcome = {.reward = -100.0, .terminated = true};
    if (x > (kTerrainLength - kTerrainGrass) * kTerrainStep) outcome.terminated = true;
    return outcome;
  }

  b2Body* hull_ = nullptr;
  std::array<b2Body*, 4> legs_{};  // upper and lower of the first, of the second
  std::array<b2RevoluteJoint*, 4> joints_{};
  std::array<Ray, kNumRays> rays_;
  std::optional<double> shaping_;  // of the last step
  std::array<float, 24> observation_{};
};

using BipedalWalker = Box2dEnv<BipedalWalkerTask>;
ENVFLEET_ENV("box2d/BipedalWalker", BipedalWalker);

}  // namespace envfleet
