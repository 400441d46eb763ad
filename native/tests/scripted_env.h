// ScriptedEnv: a native env whose actions say what happens; and a pool of them whose rows are easy to read.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "engine/env_array.h"
#include "engine/native_pool.h"
#include "tests/check.h"

namespace envfleet::test {

/// A bit generator: Steele, Lea and Flood's SplitMix64.
class Splitmix {
 public:
  explicit Splitmix(std::uint64_t seed)
      : state_(seed), bitgen_{this, next_uint64, next_uint32, next_double, next_uint64} {}
  Splitmix(const Splitmix&) = delete;
  Splitmix& operator=(const Splitmix&) = delete;

  bitgen_t* bitgen() { return &bitgen_; }
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t n) { return next() % n; }
  std::uint64_t state() const { return state_; }
  void set_state(std::uint64_t state) { state_ = state; }

 private:
  static std::uint64_t next_uint64(void* self) { return static_cast<Splitmix*>(self)->next(); }
  static std::uint32_t next_uint32(void* self) { return static_cast<std::uint32_t>(next_uint64(self) >> 32); }
  static double next_double(void* self) { return static_cast<double>(next_uint64(self) >> 11) * 0x1p-53; }

  std::uint64_t state_;
  bitgen_t bitgen_;
};

enum class Command : std::int64_t {
  kGo,
  kTerminate,
  kTruncate,
  kThrow,
  kThrowNumber,     // an exception that is no std::exception
  kThrowAtReset,    // this step is well; the next reset throws
  kThrowAtObserve,  // this step is well; observe() throws until the next step or reset
  kEndAndThrowAtReset,
  kAtRandom,     // go on, end or throw, as the env's generator says
  kSleep,        // 200 us
  kBlockHelper,  // in a helper: wait for model.release(). In the caller: wait until a helper is blocked
  kMeetHelper,   // the caller and a helper wait for each other
};

struct ScriptedAction {
  Command command = Command::kGo;
  std::int32_t number = 0;
};

struct ScriptedModel {
  explicit ScriptedModel(const Kwargs& = Kwargs()) {}
  Spec spec() const {
    return {
        .observation = Space::tuple({Space::box<std::int64_t>({4}, {-1e9}, {1e9}), Space::box<double>({2}, {0}, {1})}),
        .action = Space::tuple({Space::discrete(16), Space::box<std::int32_t>({}, {-1e9}, {1e9})}),
        .infos = {info_field<std::int64_t>("steps"), info_field<double>("even/draws", {2})}};
  }
  bool is_owner() const { return std::this_thread::get_id() == owner; }
  void release() const { is_released = true; }

  std::thread::id owner = std::this_thread::get_id();
  mutable std::atomic<std::int64_t> num_made{0};
  mutable std::atomic<int> num_blocked{0};  // helpers that have begun to wait
  mutable std::atomic<int> num_met{0};      // bit 0: the caller, bit 1: a helper
  mutable std::atomic<bool> is_released{false};
  mutable std::atomic<std::uint64_t> num_steps_of_helpers{0};  // of Command::kAtRandom
};

template <class Condition>
bool wait_until(Condition&& condition) {
  for (const Deadline deadline = patience(); !condition();) {
    if (Clock::now() >= deadline) return false;
    usleep(50);
  }
  return true;
}

/// Observation: leaf 0 is env id, episodes begun, steps of this episode, last number; leaf 1 is what reset and the last
/// step drew. Reward: the last number.
template <bool kInforms>
struct ScriptedEnv {
  using Model = ScriptedModel;

  explicit ScriptedEnv(const Model& model) : model_(&model) { state.env_id = model.num_made++; }

  void reset(Random& random, const Kwargs& options) {
    if (std::exchange(state.is_reset_bad, false) || options.flag("throw", false)) throw std::runtime_error("bad reset");
    state.is_observe_bad = options.flag("hide", false);
    ++state.num_episodes;
    state.num_steps = 0;
    state.number = static_cast<std::int64_t>(options.number("number", -1));
    state.draws = {random.random(), 0.0};
  }

  Outcome step(Action action, Random& random) {
    const auto command = static_cast<Command>(action.discrete());
    state.is_observe_bad = command == Command::kThrowAtObserve;
    if (command == Command::kThrow) throw std::runtime_error("bad step");
    if (command == Command::kThrowNumber) throw 7;
    ++state.num_steps;
    state.number = *action.leaf<std::int32_t>(1);
    state.draws[1] = random.random();
    state.is_reset_bad = command == Command::kThrowAtReset || command == Command::kEndAndThrowAtReset;
    Outcome outcome{.reward = static_cast<double>(state.number)};
    outcome.terminated = command == Command::kTerminate || command == Command::kEndAndThrowAtReset;
    outcome.truncated = command == Command::kTruncate;
    if (command == Command::kAtRandom) act_at_random(outcome);
    if (command == Command::kSleep) std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (command == Command::kBlockHelper) block_helper();
    if (command == Command::kMeetHelper) {
      model_->num_met |= model_->is_owner() ? 1 : 2;
      CHECK(wait_until([&] { return model_->num_met == 3; }));
    }
    return outcome;
  }

  void observe(envfleet::Obs obs) const {
    if (state.is_observe_bad) throw std::runtime_error("bad observation");
    const std::int64_t values[] = {state.env_id, state.num_episodes, state.num_steps, state.number};
    std::memcpy(obs.leaf<std::int64_t>(0), values, sizeof(values));
    std::memcpy(obs.leaf<double>(1), state.draws.data(), sizeof(state.draws));
  }

  void inform(Info info) const
    requires kInforms
  {
    info.set<std::int64_t>(0, state.num_steps);
    if (state.num_steps % 2 == 0) std::memcpy(info.array<double>(1), state.draws.data(), sizeof(state.draws));
  }

  struct State {
    std::int64_t env_id = 0;
    std::int64_t num_episodes = 0;
    std::int64_t num_steps = 0;
    std::int64_t number = 0;
    std::array<double, 2> draws{};
    bool is_reset_bad = false;
    bool is_observe_bad = false;
  } state;

 private:
  void act_at_random(Outcome& outcome) {
    const double draw = state.draws[1];
    if (!model_->is_owner()) model_->num_steps_of_helpers.fetch_add(1, std::memory_order_relaxed);
    // Some steps take longer, so that threads overtake each other.
    if (draw > 0.3 && draw < 0.4) std::this_thread::yield();
    for (const Deadline end = in(std::chrono::microseconds(draw > 0.4 && draw < 0.45 ? 20 : 0)); Clock::now() < end;) {
    }
    if (draw < 0.01) throw std::runtime_error("bad luck");
    if (draw < 0.015) throw 13;
    outcome.terminated = draw > 0.96;
    outcome.truncated = draw > 0.99;
    state.is_reset_bad = draw > 0.98 && draw < 0.985;
    state.is_observe_bad = draw > 0.5 && draw < 0.505;
  }
  void block_helper() const {
    if (model_->is_owner()) {
      CHECK(wait_until([&] { return model_->num_blocked > 0; }));
    } else {
      ++model_->num_blocked;
      CHECK(wait_until([&] { return model_->is_released.load(); }));
    }
  }

  const Model* model_;
};

/// One row of a batch, copied.
struct Seen {
  struct View {
    std::array<std::int64_t, 4> facts{};  // env id, episodes, steps, number
    std::array<double, 2> draws{};
    std::int64_t info_steps = -1;  // -1: absent
    std::array<double, 2> info_draws{-1, -1};
    bool operator==(const View&) const = default;

    std::int64_t env_id() const { return facts[0]; }
    std::int64_t num_episodes() const { return facts[1]; }
    std::int64_t num_steps() const { return facts[2]; }
    std::int64_t number() const { return facts[3]; }
  };
  std::int32_t env_id;
  double reward;
  bool terminated;
  bool truncated;
  std::uint8_t flags;
  View now;
  View final;  // only with kHasFinal
  bool operator==(const Seen&) const = default;
};

struct PoolSetup {
  std::uint32_t num_envs = 4;
  std::uint32_t batch_size = 0;  // of line 1; 0: there is none
  std::uint32_t num_threads = 1;
  Autoreset autoreset = Autoreset::kNextStep;
  std::uint32_t max_episode_steps = 0;
  std::chrono::nanoseconds help_worth{0};  // helpers are always called
  std::uint64_t seed = 1;
};

template <bool kInforms>
class ScriptedPool {
 public:
  using Env = ScriptedEnv<kInforms>;

  explicit ScriptedPool(const PoolSetup& setup)
      : setup(setup), layout_{2, kInforms ? 2u : 0u, setup.autoreset == Autoreset::kSameStep} {
    stores_.push_back(std::make_shared<BatchStore>(-1, batch_layout(setup.num_envs)));
    if (setup.batch_size != 0) stores_.push_back(std::make_shared<BatchStore>(-1, batch_layout(setup.batch_size)));
    auto envs = std::make_unique<EnvArrayOf<Env>>(model, setup.num_envs,
                                                  EpisodeRules{setup.autoreset, setup.max_episode_steps}, layout_);
    for (std::uint32_t i = 0; i < setup.num_envs; ++i) {
      generators_.push_back(std::make_unique<Splitmix>(setup.seed + i));
      envs->set_generator(i, Random(generators_.back()->bitgen(), true));
    }
    pool = std::make_shared<NativePool>(std::move(envs), stores_, std::vector<std::size_t>{8, 4},
                                        NativePoolConfig{setup.num_threads, {}, setup.help_worth});
  }
  ~ScriptedPool() {
    model->release();
    if (pool != nullptr) CHECK_WOKEN(pool->close(patience()));
  }

  void set_action(std::int32_t env_id, ScriptedAction action) {
    reinterpret_cast<std::int64_t*>(pool->action_column(0))[env_id] = static_cast<std::int64_t>(action.command);
    reinterpret_cast<std::int32_t*>(pool->action_column(1))[env_id] = action.number;
  }

  void send(const std::vector<std::int32_t>& env_ids, std::uint8_t line = 0) {
    pool->send(env_ids.data(), env_ids.size(), Op::kStep, line);
  }
  void send_all(Op op, std::uint8_t line = 0) { pool->send(nullptr, setup.num_envs, op, line); }

  /// Wait for a batch, copy its rows, and give it back.
  std::vector<Seen> receive(std::uint8_t line = 0) {
    Waited waited{};
    CHECK_WOKEN((waited = pool->recv(line, patience())) == Waited::kReady);
    if (waited != Waited::kReady) throw std::runtime_error("no batch");
    const BatchLine::Full full = pool->take(line);
    std::vector<Seen> rows;
    std::uint8_t flags = 0;
    for (std::uint32_t row = 0; row < stores_[line]->layout().num_rows; ++row) {
      rows.push_back(seen(line, full.buffer, row));
      flags |= rows.back().flags & ~kComplete;
    }
    CHECK(full.flags == flags);
    pool->store(line)->give_back(full.buffer);
    return rows;
  }

  std::vector<Seen> reset() {
    send_all(Op::kReset);
    return receive();
  }
  /// Step all envs with one action each; the last stands for those that follow.
  std::vector<Seen> step(const std::vector<ScriptedAction>& actions) {
    for (std::uint32_t i = 0; i < setup.num_envs; ++i) {
      set_action(static_cast<std::int32_t>(i), actions[std::min<std::size_t>(i, actions.size() - 1)]);
    }
    send_all(Op::kStep);
    return receive();
  }

  Seen seen(std::uint8_t line, std::uint32_t buffer, std::uint32_t row) const {
    BatchStore& store = *stores_[line];
    std::byte* memory = store.memory(buffer);
    Seen seen{.env_id = store.column<std::int32_t>(memory, kEnvIds)[row],
              .reward = store.column<double>(memory, kRewards)[row],
              .terminated = store.column<std::uint8_t>(memory, kTerminated)[row] != 0,
              .truncated = store.column<std::uint8_t>(memory, kTruncated)[row] != 0,
              .flags = store.column<std::uint8_t>(memory, kRowFlags)[row],
              .now = view(store, memory, row, layout_.obs(), layout_.infos()),
              .final = {}};
    if (seen.flags & kHasFinal) seen.final = view(store, memory, row, layout_.final_obs(), layout_.final_infos());
    return seen;
  }

  const PoolSetup setup;
  std::shared_ptr<const ScriptedModel> model = std::make_shared<const ScriptedModel>();

 private:
  BatchLayout batch_layout(std::uint32_t num_rows) const {
    const std::vector<std::size_t> row_bytes =
        layout_.row_bytes({32, 16}, kInforms ? std::vector<std::size_t>{8, 16} : std::vector<std::size_t>{});
    CHECK(row_bytes.size() == layout_.num_fields());
    return lay_out(num_rows, row_bytes);
  }

  static Seen::View view(BatchStore& store, std::byte* memory, std::uint32_t row, std::size_t obs, std::size_t infos) {
    Seen::View view;
    std::memcpy(view.facts.data(), store.column<std::int64_t>(memory, obs) + 4 * row, sizeof(view.facts));
    std::memcpy(view.draws.data(), store.column<double>(memory, obs + 1) + 2 * row, sizeof(view.draws));
    if constexpr (kInforms) {
      const auto* steps = store.column<std::int64_t>(memory, infos) + row;
      const auto* draws = store.column<double>(memory, infos + 2) + 2 * row;
      if (store.column<std::uint8_t>(memory, infos + 1)[row]) {
        view.info_steps = *steps;
      } else {
        CHECK(*steps == 0);  // what is absent is zero
      }
      if (store.column<std::uint8_t>(memory, infos + 3)[row]) {
        view.info_draws = {draws[0], draws[1]};
      } else {
        CHECK(draws[0] == 0 && draws[1] == 0);
      }
    }
    return view;
  }

  RowLayout layout_;
  std::vector<std::shared_ptr<BatchStore>> stores_;
  std::vector<std::unique_ptr<Splitmix>> generators_;  // outlive the pool

 public:
  std::shared_ptr<NativePool> pool;
};

}  // namespace envfleet::test
