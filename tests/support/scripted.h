// For the conformance suite: the native twins of envfleet.testing's ScriptedEnv and BoxActionEnv, and an env with
// nested spaces.
#pragma once

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "engine/registry.h"

namespace envfleet::test {

struct Scripted {
  enum Act : std::int64_t {
    kGoOn = 0,
    kTerminate = 1,
    kTruncate = 2,
    kEndBoth = 3,
    kRaise = 4,
    kSleep = 8,
    kWrongShape = 9,
    kFailNextReset = 10,
  };
  enum InfoIndex : std::size_t { kFirst, kLevel, kStep, kLength, kReturn };

  struct Model {
    explicit Model(const Kwargs& kwargs) : sleep_s(kwargs.number("sleep_s", 0.2)) {}

    static Spec spec() {
      return {.observation = Space::box<double>({4}, {-kInfinity}, {kInfinity}),
              .action = Space::discrete(11),
              .infos = {info_field<bool>("first"), info_field<std::int64_t>("options/level"),
                        info_field<std::int64_t>("step"), info_field<std::int64_t>("episode/l"),
                        info_field<double>("episode/r")}};
    }

    double sleep_s;
  };

  struct State {
    double number, num_steps, num_episodes, last_act;
    std::int64_t level;
    bool fails_at_reset, was_reset, has_ended;
  };

  explicit Scripted(const Model& shared) : model(&shared) {}

  void reset(Random& random, const Kwargs& options) {
    const bool must_fail = state.fails_at_reset || options.flag("fail", false);
    if (must_fail) {
      state.fails_at_reset = false;
      throw std::runtime_error("told to fail in reset");
    }
    const double num_episodes = random.is_newly_seeded() ? 0.0 : state.num_episodes + 1;
    const auto level = static_cast<std::int64_t>(options.number("level", -1));
    state = {random.random(), 0.0, num_episodes, -1.0, level, false, true, false};
  }

  Outcome step(Action action, Random&) {
    const std::int64_t act = action.discrete();
    if (act == kRaise) throw std::runtime_error("told to fail in step");
    if (act == kSleep) std::this_thread::sleep_for(std::chrono::duration<double>(model->sleep_s));
    state.fails_at_reset = act == kFailNextReset;
    state.num_steps += 1;
    state.last_act = static_cast<double>(act);
    state.was_reset = false;
    if (act == kWrongShape) throw std::runtime_error("no native env can do this");
    const bool terminated = act == kTerminate || act == kEndBoth || act == kFailNextReset;
    const bool truncated = act == kTruncate || act == kEndBoth;
    state.has_ended = terminated || truncated;
    return {.reward = state.num_steps + 0.1, .terminated = terminated, .truncated = truncated};
  }

  void observe(Obs obs) const {
    double* out = obs.leaf<double>();
    out[0] = state.number;
    out[1] = state.num_steps;
    out[2] = state.num_episodes;
    out[3] = state.last_act;
  }

  void inform(Info info) const {
    if (state.was_reset) {
      info.set(kFirst, true);
      if (state.level >= 0) info.set(kLevel, state.level);
      return;
    }
    info.set(kStep, static_cast<std::int64_t>(state.num_steps));
    if (!state.has_ended) return;
    info.set(kLength, static_cast<std::int64_t>(state.num_steps));
    info.set(kReturn, state.num_steps);
  }

  const Model* model;
  State state{};
};

struct BoxAction {
  struct Model {
    explicit Model(const Kwargs&) {}
    static Spec spec() {
      return {.observation = Space::box<float>({3}, {-10}, {10}), .action = Space::box<float>({3}, {-1}, {1})};
    }
  };
  struct State {
    float shown[3], kept[3];
  };

  explicit BoxAction(const Model&) {}
  void reset(Random&, const Kwargs&) { state = {}; }
  Outcome step(Action action, Random&) {
    double sum = 0.0;
    for (int i = 0; i < 3; ++i) {
      state.shown[i] = state.kept[i];
      state.kept[i] = action.leaf<float>()[i];
      sum += state.shown[i];
    }
    return {.reward = sum};
  }
  void observe(Obs obs) const {
    for (int i = 0; i < 3; ++i) obs.leaf<float>()[i] = state.shown[i];
  }
  State state{};
};

/// Nested spaces of every kind: the observation shows the action.
struct Tree {
  struct Model {
    explicit Model(const Kwargs&) {}
    static Spec spec() {
      return {.observation = Space::dict({{"move", Space::box<float>({2}, {-1, -2}, {1, 2})},
                                          {"pair", Space::tuple({Space::discrete(5), Space::multi_binary({2, 3})})},
                                          {"picks", Space::multi_discrete({3, 4})},
                                          {"pixels", Space::box<std::uint8_t>({2, 2}, {0}, {255})}}),
              .action = Space::dict({{"bits", Space::multi_binary({2, 3})},
                                     {"move", Space::box<float>({2}, {-1, -2}, {1, 2})},
                                     {"number", Space::discrete(5)},
                                     {"picks", Space::multi_discrete({3, 4})}})};
    }
  };
  struct State {
    float move[2];
    std::int64_t number;
    std::int8_t bits[6];
    std::int64_t picks[2];
    std::uint8_t pixels[4];
  };

  explicit Tree(const Model&) {}
  void reset(Random& random, const Kwargs&) {
    state = {};
    for (std::uint8_t& pixel : state.pixels) pixel = static_cast<std::uint8_t>(random.integers(256));
  }
  Outcome step(Action action, Random&) {
    std::copy_n(action.leaf<std::int8_t>(0), 6, state.bits);
    std::copy_n(action.leaf<float>(1), 2, state.move);
    state.number = *action.leaf<std::int64_t>(2);
    std::copy_n(action.leaf<std::int64_t>(3), 2, state.picks);
    return {.reward = 1.0, .terminated = state.number == 4};
  }
  void observe(Obs obs) const {
    std::copy_n(state.move, 2, obs.leaf<float>(0));
    *obs.leaf<std::int64_t>(1) = state.number;
    std::copy_n(state.bits, 6, obs.leaf<std::int8_t>(2));
    std::copy_n(state.picks, 2, obs.leaf<std::int64_t>(3));
    std::copy_n(state.pixels, 4, obs.leaf<std::uint8_t>(4));
  }
  State state{};
};

ENVFLEET_ENV("Tree-v0", Tree);
ENVFLEET_ENV("Scripted-v0", Scripted);
ENVFLEET_ENV("BoxAction-v0", BoxAction);

}  // namespace envfleet::test
