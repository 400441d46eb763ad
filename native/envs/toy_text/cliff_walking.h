// CliffWalking: Gymnasium's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/registry.h"
#include "envs/toy_text/transitions.h"

namespace envfleet {

struct CliffWalkingModel {
  explicit CliffWalkingModel(const Kwargs& kwargs)
      : starts({kStart}), transitions(kNumStates, kNumActions, kwargs.flag("is_slippery", false) ? 3 : 1) {
    const bool is_slippery = kwargs.flag("is_slippery", false);
    for (std::int32_t s = 0; s < kNumStates; ++s) {
      for (std::int32_t action = 0; action < kNumActions; ++action) {
        if (is_slippery) {
          const std::int32_t left = (action + 3) % 4;
          const std::int32_t right = (action + 1) % 4;
          transitions.set(s, action, {moved(s, left, 1.0 / 3), moved(s, action, 1.0 / 3), moved(s, right, 1.0 / 3)});
        } else {
          transitions.set(s, action, {moved(s, action, 1.0)});
        }
      }
    }
  }

  static Spec spec() {
    return {.observation = Space::discrete(kNumStates),
            .action = Space::discrete(kNumActions),
            .infos = {info_field<double>("prob")}};
  }

  static constexpr std::int32_t kNumRows = 4;
  static constexpr std::int32_t kNumColumns = 12;
  static constexpr std::int32_t kNumStates = kNumRows * kNumColumns;
  static constexpr std::int32_t kNumActions = 4;           // up, right, down, left
  static constexpr std::int32_t kStart = 3 * kNumColumns;  // the cliff lies between start and goal
  static constexpr std::int32_t kGoal = kNumStates - 1;

  StartStates starts;
  TransitionTable transitions;

 private:
  static Transition moved(std::int32_t s, std::int32_t direction, double probability) {
    static constexpr std::int32_t kRowSteps[] = {-1, 0, 1, 0};
    static constexpr std::int32_t kColumnSteps[] = {0, 1, 0, -1};
    const std::int32_t row = std::clamp(s / kNumColumns + kRowSteps[direction], 0, kNumRows - 1);
    const std::int32_t column = std::clamp(s % kNumColumns + kColumnSteps[direction], 0, kNumColumns - 1);
    const std::int32_t next = row * kNumColumns + column;
    if (next > kStart && next < kGoal) return {probability, kStart, false, -100.0};
    return {probability, next, next == kGoal, -1.0};
  }
};

using CliffWalking = TableEnv<CliffWalkingModel>;

ENVFLEET_ENV("CliffWalking", CliffWalking);

}  // namespace envfleet
