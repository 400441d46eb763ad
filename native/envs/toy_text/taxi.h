// Taxi: Gymnasium's Taxi-v4, which without rain and fickle passengers is also Taxi-v3.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/registry.h"
#include "envs/toy_text/transitions.h"

namespace envfleet {

struct Taxi {
  static constexpr std::int32_t kNumActions = 6;  // south, north, east, west, pick up, drop off
  static constexpr std::int32_t kNumStates = 500;
  static constexpr std::int32_t kInTaxi = 4;  // where the passenger is, besides stops 0 to 3

  struct Place {
    std::int32_t row, column;
    bool operator==(const Place&) const = default;
  };

  /// What a state's number means.
  struct Scene {
    Place taxi;
    std::int32_t passenger, destination;

    static Scene of(std::int32_t s) { return {{s / 100, s / 20 % 5}, s / 4 % 5, s % 4}; }
    std::int32_t s() const { return ((taxi.row * 5 + taxi.column) * 5 + passenger) * 4 + destination; }
  };

  struct Model {
    explicit Model(const Kwargs& kwargs)
        : is_fickle(kwargs.flag("fickle_passenger", false)),
          fickle_probability(kwargs.number("fickle_probability", 0.3)),
          starts(find_starts()),
          transitions(kNumStates, kNumActions, kwargs.flag("is_rainy", false) ? 3 : 1) {
      const bool is_rainy = kwargs.flag("is_rainy", false);
      const double straight = kwargs.number("rainy_probability", 0.8);
      for (std::int32_t s = 0; s < kNumStates; ++s) {
        masks[static_cast<std::size_t>(s)] = mask_of(Scene::of(s));
        for (std::int32_t action = 0; action < kNumActions; ++action) {
          transitions.set(s, action,
                          is_rainy && action < 4 ? drifts(Scene::of(s), action, straight)
                                                 : std::vector{outcome(Scene::of(s), action)});
        }
      }
    }

    static Spec spec() {
      return {.observation = Space::discrete(kNumStates),
              .action = Space::discrete(kNumActions),
              .infos = {info_field<double>("prob"), info_field<std::int8_t>("action_mask", {kNumActions})}};
    }

    bool is_fickle;
    double fickle_probability;
    StartStates starts;
    TransitionTable transitions;
    std::array<std::array<std::int8_t, kNumActions>, kNumStates> masks;  // 1: the action changes the state
  };

  struct State {
    std::int32_t s;
    std::int32_t last_action;  // -1: none yet
    double prob;               // of the transition that led here
    std::int32_t orientation;  // the last direction driven; 0 at first
    bool fickle_step;          // the passenger will think again when first driven
  };

  explicit Taxi(const Model& shared) : model(&shared) {}

  void reset(Random& random, const Kwargs&) {
    const std::int32_t s = model->starts.sample(random);
    const bool fickle_step = model->is_fickle && random.random() < model->fickle_probability;
    state = {s, -1, 1.0, 0, fickle_step};
  }

  Outcome step(Action action, Random& random) {
    const Transition& taken = model->transitions.sample(state.s, action.discrete(), random);
    std::int32_t next = taken.next_state;
    if (state.fickle_step) {
      const Scene before = Scene::of(state.s);
      Scene after = Scene::of(next);
      if (before.passenger == kInTaxi && after.taxi != before.taxi) {
        state.fickle_step = false;
        const auto other = static_cast<std::int32_t>(random.integers(3));
        after.destination = other < before.destination ? other : other + 1;
        next = after.s();
      }
    }
    state.s = next;
    state.last_action = static_cast<std::int32_t>(action.discrete());
    state.prob = taken.probability;
    if (state.last_action < 4) state.orientation = state.last_action;
    return {.reward = taken.reward, .terminated = taken.terminated};
  }

  void observe(Obs obs) const { *obs.leaf<std::int64_t>() = state.s; }

  void inform(Info info) const {
    info.set<double>(0, state.prob);
    const auto& mask = model->masks[static_cast<std::size_t>(state.s)];
    std::memcpy(info.array<std::int8_t>(1), mask.data(), mask.size());
  }

  const Model* model;
  State state{};

 private:
  static constexpr std::array<Place, 4> kStops{{{0, 0}, {0, 4}, {4, 0}, {4, 3}}};

  /// There are walls between columns only: east of column 1 above, of columns 0 and 2 below.
  static bool is_open_to_the_east(Place at) {
    if (at.column == 4) return false;
    if (at.row < 2) return at.column != 1;
    if (at.row > 2) return at.column != 0 && at.column != 2;
    return true;
  }

  /// Where the taxi is after driving south, north, east or west; where it was if it cannot.
  static Place driven(Place from, std::int32_t direction) {
    switch (direction) {
      case 0:
        return {std::min(from.row + 1, 4), from.column};
      case 1:
        return {std::max(from.row - 1, 0), from.column};
      case 2:
        return is_open_to_the_east(from) ? Place{from.row, from.column + 1} : from;
      default: {
        const Place west{from.row, from.column - 1};
        return from.column > 0 && is_open_to_the_east(west) ? west : from;
      }
    }
  }

  static Transition outcome(Scene scene, std::int32_t action) {
    if (action < 4) {
      scene.taxi = driven(scene.taxi, action);
      return {1.0, scene.s(), false, -1.0};
    }
    const auto stop = static_cast<std::int32_t>(std::find(kStops.begin(), kStops.end(), scene.taxi) - kStops.begin());
    const bool is_at_stop = stop < 4;
    if (action == 4) {
      if (!is_at_stop || scene.passenger != stop) return {1.0, scene.s(), false, -10.0};
      scene.passenger = kInTaxi;
      return {1.0, scene.s(), false, -1.0};
    }
    if (!is_at_stop || scene.passenger != kInTaxi) return {1.0, scene.s(), false, -10.0};
    scene.passenger = stop;
    const bool has_arrived = stop == scene.destination;
    return {1.0, scene.s(), has_arrived, has_arrived ? 20.0 : -1.0};
  }

  /// In the rain a taxi that can drive may drift to its left or right.
  static std::vector<Transition> drifts(Scene scene, std::int32_t action, double straight) {
    static constexpr std::int32_t kLeft[] = {2, 3, 1, 0};
    static constexpr std::int32_t kRight[] = {3, 2, 0, 1};
    const double sideways = (1.0 - straight) / 2.0;
    const bool can_drive = driven(scene.taxi, action) != scene.taxi;
    const auto to = [&](std::int32_t direction, double probability) {
      Scene next = scene;
      if (can_drive) next.taxi = driven(scene.taxi, direction);
      return Transition{probability, next.s(), false, -1.0};
    };
    return {to(action, straight), to(kLeft[action], sideways), to(kRight[action], sideways)};
  }

  static std::array<std::int8_t, kNumActions> mask_of(const Scene& scene) {
    std::array<std::int8_t, kNumActions> mask{};
    for (std::int32_t action = 0; action < kNumActions; ++action) {
      mask[static_cast<std::size_t>(action)] = outcome(scene, action).next_state != scene.s();
    }
    return mask;
  }

  static StartStates find_starts() {
    std::vector<std::int32_t> found;
    for (std::int32_t s = 0; s < kNumStates; ++s) {
      const Scene scene = Scene::of(s);
      if (scene.passenger != kInTaxi && scene.passenger != scene.destination) found.push_back(s);
    }
    return StartStates(std::move(found));
  }
};

ENVFLEET_ENV("Taxi", Taxi);

}  // namespace envfleet
