// FrozenLake: Gymnasium's, on a map of its own or the caller's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/registry.h"
#include "envs/toy_text/transitions.h"

namespace envfleet {

struct FrozenLakeModel {
  explicit FrozenLakeModel(const Kwargs& kwargs)
      : desc(map_of(kwargs)),
        starts(find_starts(desc)),
        transitions(num_states(), kNumActions, kwargs.flag("is_slippery", true) ? 3 : 1) {
    const bool is_slippery = kwargs.flag("is_slippery", true);
    const double success_rate = kwargs.number("success_rate", 1.0 / 3.0);
    const double fail_rate = (1.0 - success_rate) / 2.0;
    const std::vector<double> rewards = kwargs.numbers("reward_schedule", {1.0, 0.0, 0.0});
    if (rewards.size() != 3) {
      throw std::invalid_argument("'reward_schedule' must have 3 numbers, for goal, hole and ice; got " +
                                  std::to_string(rewards.size()));
    }
    for (std::int32_t s = 0; s < num_states(); ++s) {
      for (std::int32_t action = 0; action < kNumActions; ++action) {
        std::vector<Transition> choices;
        if (is_end(tile(s))) {
          choices = {{1.0, s, true, 0.0}};
        } else if (is_slippery) {
          for (const std::int32_t turn : {3, 0, 1}) {
            choices.push_back(moved(s, (action + turn) % 4, turn == 0 ? success_rate : fail_rate, rewards));
          }
        } else {
          choices = {moved(s, action, 1.0, rewards)};
        }
        transitions.set(s, action, choices);
      }
    }
  }

  Spec spec() const {
    return {.observation = Space::discrete(num_states()),
            .action = Space::discrete(kNumActions),
            .infos = {info_field<double>("prob")}};
  }

  static constexpr std::int32_t kNumActions = 4;  // left, down, right, up

  std::vector<std::string> desc;  // rows of tiles: Start, Frozen, Hole, Goal
  StartStates starts;
  TransitionTable transitions;

 private:
  static std::vector<std::string> map_of(const Kwargs& kwargs) {
    static const std::vector<std::string> k4x4{"SFFF", "FHFH", "FFFH", "HFFG"};
    static const std::vector<std::string> k8x8{"SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF",
                                               "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG"};
    const std::string name = kwargs.text("map_name", "4x4");
    const std::vector<std::string> desc =
        kwargs.is_none("desc") ? std::vector<std::string>() : kwargs.texts("desc", {});
    if (desc.empty()) {
      if (name == "4x4") return k4x4;
      if (name == "8x8") return k8x8;
      throw std::invalid_argument("no map is called '" + name + "'; known: 4x4, 8x8");
    }
    for (const std::string& row : desc) {
      if (row.empty() || row.size() != desc[0].size()) {
        throw std::invalid_argument("the rows of 'desc' must have the same length, at least 1");
      }
    }
    return desc;
  }

  static StartStates find_starts(const std::vector<std::string>& desc) {
    std::vector<std::int32_t> found;
    std::int32_t s = 0;
    for (const std::string& row : desc) {
      for (const char letter : row) {
        if (letter == 'S') found.push_back(s);
        ++s;
      }
    }
    if (found.empty()) throw std::invalid_argument("'desc' must have a start, 'S'");
    return StartStates(std::move(found));
  }

  std::int32_t num_rows() const { return static_cast<std::int32_t>(desc.size()); }
  std::int32_t num_columns() const { return static_cast<std::int32_t>(desc[0].size()); }
  std::int32_t num_states() const { return num_rows() * num_columns(); }
  char tile(std::int32_t s) const {
    return desc[static_cast<std::size_t>(s / num_columns())][static_cast<std::size_t>(s % num_columns())];
  }
  static bool is_end(char tile) { return tile == 'G' || tile == 'H'; }

  Transition moved(std::int32_t s, std::int32_t direction, double probability,
                   const std::vector<double>& rewards) const {
    std::int32_t row = s / num_columns();
    std::int32_t column = s % num_columns();
    switch (direction) {
      case 0:
        column = std::max(column - 1, 0);
        break;
      case 1:
        row = std::min(row + 1, num_rows() - 1);
        break;
      case 2:
        column = std::min(column + 1, num_columns() - 1);
        break;
      default:
        row = std::max(row - 1, 0);
    }
    const std::int32_t next = row * num_columns() + column;
    const double reward = tile(next) == 'G' ? rewards[0] : tile(next) == 'H' ? rewards[1] : rewards[2];
    return {probability, next, is_end(tile(next)), reward};
  }
};

using FrozenLake = TableEnv<FrozenLakeModel>;

ENVFLEET_ENV("FrozenLake", FrozenLake);

}  // namespace envfleet
