// The ground that BipedalWalker walks on: drawn number for number as Gymnasium draws it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "envs/box2d/bodies.h"
#include "envs/box2d/draws.h"

namespace envfleet {

inline constexpr double kTerrainStep = 14 / kScale;
inline constexpr int kTerrainLength = 200;  // in steps
inline constexpr double kTerrainHeight = kViewportH / kScale / 4;
inline constexpr int kTerrainGrass = 10;     // how long grass spots are, at most
inline constexpr int kTerrainStartpad = 20;  // in steps
inline constexpr float kTerrainFriction = 2.5f;

/// Adds the ground to a world, step by step from left to right.
class BipedalTerrain {
 public:
  static constexpr std::size_t kMaxDraws = 5 * kTerrainLength;

  BipedalTerrain(b2World& world, Draws& draws, bool is_hardcore)
      : world_(world), draws_(draws), is_hardcore_(is_hardcore) {}

  void add() {
    std::array<double, kTerrainLength> heights;
    for (int i = 0; i < kTerrainLength; ++i) {
      advance(i);
      heights[static_cast<std::size_t>(i)] = y_;
    }
    for (std::size_t i = 0; i + 1 < kTerrainLength; ++i) {
      const auto x = static_cast<double>(i);
      add_body(edge(vec(x * kTerrainStep, heights[i]), vec((x + 1) * kTerrainStep, heights[i + 1])));
    }
  }

 private:
  enum Kind : std::int64_t { kGrass = 0, kStump = 1, kStairs = 2, kPit = 3, kNumKinds = 4 };

  void advance(int i) {
    const double x = i * kTerrainStep;
    if (kind_ == kGrass && !is_new_) {
      velocity_ = 0.8 * velocity_ + 0.01 * sign(kTerrainHeight - y_);
      if (i > kTerrainStartpad) velocity_ += draws_.uniform(-1, 1) / kScale;
      y_ += velocity_;
    } else if (kind_ == kPit && is_new_) {
      begin_pit(x);
    } else if (kind_ == kPit) {
      y_ = original_y_;
      if (num_left_ > 1) y_ -= 4 * kTerrainStep;
    } else if (kind_ == kStump && is_new_) {
      num_left_ = draws_.integers(1, 3);
      const double size = static_cast<double>(num_left_) * kTerrainStep;
      add_body(polygon({{x, y_}, {x + size, y_}, {x + size, y_ + size}, {x, y_ + size}}));
    } else if (kind_ == kStairs && is_new_) {
      begin_stairs(x);
    } else if (kind_ == kStairs) {
      const std::int64_t s = stair_steps_ * stair_width_ - num_left_ - stair_height_;
      const double n = static_cast<double>(s) / static_cast<double>(stair_width_);
      y_ = original_y_ + (n * static_cast<double>(stair_height_)) * kTerrainStep;
    }
    is_new_ = false;
    if (--num_left_ == 0) {
      num_left_ = draws_.integers(kTerrainGrass / 2, kTerrainGrass);
      kind_ = kind_ == kGrass && is_hardcore_ ? draws_.integers(1, kNumKinds) : kGrass;
      is_new_ = true;
    }
  }

  void begin_pit(double x) {
    num_left_ = draws_.integers(3, 5);
    const double bottom = y_ - 4 * kTerrainStep;
    const double away = kTerrainStep * static_cast<double>(num_left_);
    for (const double shift : {0.0, away}) {
      const double left = x + shift, right = x + kTerrainStep + shift;
      add_body(polygon({{left, y_}, {right, y_}, {right, bottom}, {left, bottom}}));
    }
    num_left_ += 2;
    original_y_ = y_;
  }

  void begin_stairs(double x) {
    stair_height_ = draws_.random() > 0.5 ? +1 : -1;
    stair_width_ = draws_.integers(4, 5);
    stair_steps_ = draws_.integers(3, 5);
    original_y_ = y_;
    for (std::int64_t s = 0; s < stair_steps_; ++s) {
      const double left = x + static_cast<double>(s * stair_width_) * kTerrainStep;
      const double right = x + static_cast<double>((1 + s) * stair_width_) * kTerrainStep;
      const double top = y_ + static_cast<double>(s * stair_height_) * kTerrainStep;
      const double bottom = y_ + static_cast<double>(-1 + s * stair_height_) * kTerrainStep;
      add_body(polygon({{left, top}, {right, top}, {right, bottom}, {left, bottom}}));
    }
    num_left_ = stair_steps_ * stair_width_;
  }

  void add_body(const b2Shape& shape) {
    b2BodyDef body_def;
    add_ground(world_.CreateBody(&body_def), shape, kTerrainFriction);
  }

  static double sign(double x) { return x > 0 ? 1.0 : x < 0 ? -1.0 : 0.0; }

  b2World& world_;
  Draws& draws_;
  bool is_hardcore_;
  std::int64_t kind_ = kGrass;
  bool is_new_ = false;  // the first step of its kind
  double velocity_ = 0.0;
  double y_ = kTerrainHeight;
  std::int64_t num_left_ = kTerrainStartpad;  // steps of this kind
  std::int64_t stair_steps_ = 0, stair_width_ = 0, stair_height_ = 0;
  double original_y_ = 0.0;
};

}  // namespace envfleet
