// What environments with a table of transitions share: the table, the start states, and the walk through them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/env.h"

namespace envfleet {

/// One of the things that may follow an action.
struct Transition {
  double probability;
  std::int32_t next_state;
  bool terminated;
  double reward;
  double cumulative = 0.0;  // the probability of this one and all before it; the table sets it
};

/// What may follow each action in each state.
class TransitionTable {
 public:
  TransitionTable(std::int64_t num_states, std::int64_t num_actions, std::size_t max_transitions)
      : num_actions_(static_cast<std::size_t>(num_actions)),
        width_(max_transitions),
        transitions_(static_cast<std::size_t>(num_states) * num_actions_ * width_) {}

  void set(std::int64_t state, std::int64_t action, const std::vector<Transition>& transitions) {
    Transition* out = &transitions_[index(state, action)];
    double cumulative = 0.0;
    for (std::size_t i = 0; i < width_; ++i) {
      // The rest of the row repeats the last one, which is then found first.
      out[i] = transitions[std::min(i, transitions.size() - 1)];
      if (i < transitions.size()) cumulative += out[i].probability;
      out[i].cumulative = cumulative;
    }
  }

  /// The first whose cumulative probability is greater than a random number. Rounding may leave none: then the first.
  const Transition& sample(std::int64_t state, std::int64_t action, Random& random) const {
    const Transition* choices = &transitions_[index(state, action)];
    const double drawn = random.random();
    for (std::size_t i = 0; i < width_; ++i) {
      if (choices[i].cumulative > drawn) return choices[i];
    }
    return choices[0];
  }

 private:
  std::size_t index(std::int64_t state, std::int64_t action) const {
    return (static_cast<std::size_t>(state) * num_actions_ + static_cast<std::size_t>(action)) * width_;
  }

  std::size_t num_actions_;
  std::size_t width_;
  std::vector<Transition> transitions_;  // [num_states, num_actions, width]
};

/// States that are equally likely at the start.
class StartStates {
 public:
  explicit StartStates(std::vector<std::int32_t> states) : states_(std::move(states)), cumulative_(states_.size()) {
    double sum = 0.0;
    for (double& cumulative : cumulative_) cumulative = sum += 1.0 / static_cast<double>(states_.size());
  }

  /// As sample() above, among all states: where rounding leaves none it is state 0, whether that is a start or not.
  std::int32_t sample(Random& random) const {
    const auto found = std::upper_bound(cumulative_.begin(), cumulative_.end(), random.random());
    return found == cumulative_.end() ? 0 : states_[static_cast<std::size_t>(found - cumulative_.begin())];
  }

 private:
  std::vector<std::int32_t> states_;
  std::vector<double> cumulative_;
};

/// An environment that is its Model's `transitions` and `starts`, and nothing else.
template <class TableModel>
struct TableEnv {
  using Model = TableModel;

  struct State {
    std::int32_t s;
    std::int32_t last_action;  // -1: none yet
    double prob;               // of the transition that led here
  };

  explicit TableEnv(const Model& shared) : model(&shared) {}

  void reset(Random& random, const Kwargs&) { state = {model->starts.sample(random), -1, 1.0}; }

  Outcome step(Action action, Random& random) {
    const Transition& taken = model->transitions.sample(state.s, action.discrete(), random);
    state = {taken.next_state, static_cast<std::int32_t>(action.discrete()), taken.probability};
    return {.reward = taken.reward, .terminated = taken.terminated};
  }

  void observe(Obs obs) const { *obs.leaf<std::int64_t>() = state.s; }
  void inform(Info info) const { info.set<double>(0, state.prob); }

  const Model* model;
  State state{};
};

}  // namespace envfleet
