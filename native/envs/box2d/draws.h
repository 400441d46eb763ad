// Draws: random numbers that are noted. A b2World cannot be copied, but what came from outside since it was made,
// random numbers and actions, brings it again, to the last bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "engine/random.h"

namespace envfleet {

inline constexpr const char* kBroken = "this is no state that get_state() gave";

/// Random numbers that are noted as they are drawn, or read from where they were noted.
class Draws {
 public:
  /// Beyond `max_noted` numbers nothing is noted: such an episode cannot be played again (see Box2dEnv::load).
  Draws(Random& random, std::vector<double>& noted, std::size_t max_noted)
      : random_(&random), noted_(noted), max_noted_(max_noted) {}
  explicit Draws(std::vector<double>& noted) : noted_(noted) {}

  double random() {
    return next([](Random& random) { return random.random(); });
  }
  double uniform(double low, double high) {
    return next([&](Random& random) { return random.uniform(low, high); });
  }
  /// Generator.integers(low, high): below `high`.
  std::int64_t integers(std::int64_t low, std::int64_t high) {
    return static_cast<std::int64_t>(
        next([&](Random& random) { return static_cast<double>(low + random.integers(high - low)); }));
  }

 private:
  template <class Draw>
  double next(const Draw& draw) {
    if (random_ == nullptr) {
      if (num_read_ == noted_.size()) throw std::invalid_argument(kBroken);
      return noted_[num_read_++];
    }
    const double value = draw(*random_);
    if (noted_.size() < max_noted_) noted_.push_back(value);
    return value;
  }

  Random* random_ = nullptr;  // null: read the notes
  std::vector<double>& noted_;
  std::size_t max_noted_ = 0;
  std::size_t num_read_ = 0;
};

}  // namespace envfleet
