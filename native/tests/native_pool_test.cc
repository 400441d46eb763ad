// NativePool: the same rows with any number of threads; nothing lost, nothing twice.
#include "engine/native_pool.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/scripted_env.h"

namespace envfleet::test {
namespace {

using Rows = std::vector<Seen>;

constexpr int kNumSteps = 12'000 / kSlowdown;

/// The action of an env's k-th step.
ScriptedAction action_of(std::int32_t env_id, std::size_t k) {
  Splitmix random(static_cast<std::uint64_t>(env_id) << 32 | k);
  return {Command::kAtRandom, static_cast<std::int32_t>(random.below(1'000'000))};
}

/// The first rows of each env. An env that its autoreset mode does not reset is reset by the caller.
std::vector<Rows> rows_of_each_env(const PoolSetup& setup, std::size_t num_rows) {
  ScriptedPool<true> pool(setup);
  std::vector<Rows> rows(setup.num_envs);
  std::vector<std::size_t> num_steps(setup.num_envs);
  for (Rows received = pool.reset();; received = pool.receive()) {
    std::vector<std::int32_t> to_step, to_reset;
    for (const Seen& seen : received) {
      const auto i = static_cast<std::size_t>(seen.env_id);
      rows[i].push_back(seen);
      if (pool.pool->envs().has_ended(i) && setup.autoreset != Autoreset::kNextStep) {
        to_reset.push_back(seen.env_id);
      } else {
        to_step.push_back(seen.env_id);
        pool.set_action(seen.env_id, action_of(seen.env_id, num_steps[i]++));
      }
    }
    if (rows[0].size() == num_rows) break;
    pool.pool->send(to_reset.data(), to_reset.size(), Op::kReset, 0);
    pool.pool->send(to_step.data(), to_step.size(), Op::kStep, 0);
  }
  CHECK(pool.pool->num_helpers() == setup.num_threads - 1);
  CHECK((pool.model->num_steps_of_helpers > 0) == (setup.num_threads > 1));
  return rows;
}

template <Autoreset kAutoreset>
void any_number_of_threads() {
  PoolSetup setup{.num_envs = 13, .autoreset = kAutoreset, .max_episode_steps = 50};
  const auto expected = rows_of_each_env(setup, kNumSteps);
  int num_failed = 0;
  for (const Seen& seen : expected[0]) num_failed += (seen.flags & kFailed) != 0;
  CHECK(num_failed > 10);
  for (const std::uint32_t num_threads : {2, 4}) {
    setup.num_threads = num_threads;
    CHECK(rows_of_each_env(setup, kNumSteps) == expected);
  }
}

/// send() of all envs, which are then stepped in runs.
void runs_of_envs() {
  const PoolSetup alone{.num_envs = 97, .max_episode_steps = 30};
  const auto expected = rows_of_each_env(alone, kNumSteps / 8);
  for (const std::uint32_t num_threads : {1, 2, 4}) {
    PoolSetup setup = alone;
    setup.num_threads = num_threads;
    ScriptedPool<true> pool(setup);
    Rows rows = pool.reset();
    for (std::size_t k = 0; k < expected[0].size(); ++k) {
      for (std::size_t i = 0; i < rows.size(); ++i) CHECK(rows[i] == expected[i][k]);
      for (std::int32_t i = 0; i < 97; ++i) pool.set_action(i, action_of(i, k));
      pool.send_all(Op::kStep);
      rows = pool.receive();
    }
    CHECK(pool.pool->num_helpers() == num_threads - 1);
  }
}

/// Batches of the first to finish, sent again in any order, now and then some of them later.
template <Autoreset kAutoreset>
void asynchronously() {
  const PoolSetup alone{.num_envs = 12, .autoreset = kAutoreset, .max_episode_steps = 40};
  const auto expected = rows_of_each_env(alone, kNumSteps);
  for (const std::uint32_t num_threads : {1, 2, 4}) {
    PoolSetup setup = alone;
    setup.batch_size = 5;
    setup.num_threads = num_threads;
    ScriptedPool<true> pool(setup);
    Splitmix random(num_threads);
    std::vector<std::size_t> num_rows(12), num_steps(12);
    std::vector<bool> is_in_flight(12, true);
    std::vector<std::int32_t> held_back;
    pool.send_all(Op::kReset, 1);
    for (std::size_t num_in_flight = 12; *std::min_element(num_rows.begin(), num_rows.end()) < kNumSteps / 4;) {
      std::vector<std::int32_t> to_step, to_reset;
      for (const Seen& seen : pool.receive(1)) {
        const auto i = static_cast<std::size_t>(seen.env_id);
        CHECK(is_in_flight[i]);
        is_in_flight[i] = false;
        --num_in_flight;
        if (num_rows[i] < expected[i].size()) CHECK(seen == expected[i][num_rows[i]]);
        ++num_rows[i];
        held_back.push_back(seen.env_id);
      }
      for (std::size_t i = held_back.size(); i > 1; --i) std::swap(held_back[i - 1], held_back[random.below(i)]);
      while (!held_back.empty() && (num_in_flight < 5 || random.below(8) != 0)) {
        const std::int32_t env_id = held_back.back();
        const auto i = static_cast<std::size_t>(env_id);
        held_back.pop_back();
        is_in_flight[i] = true;
        ++num_in_flight;
        if (kAutoreset != Autoreset::kNextStep && pool.pool->envs().has_ended(i)) {
          to_reset.push_back(env_id);
        } else {
          to_step.push_back(env_id);
          pool.set_action(env_id, action_of(env_id, num_steps[i]++));
        }
      }
      if (!to_reset.empty()) pool.pool->send(to_reset.data(), to_reset.size(), Op::kReset, 1);
      if (!to_step.empty()) pool.send(to_step, 1);
    }
    // What is in flight is forgotten; then comes a batch of all envs.
    CHECK(pool.pool->drain(patience()));
    CHECK(pool.pool->store(1)->num_leased() == 0);
    pool.reset();  // may fail, as the last step of an env decides
    for (const Seen& seen : pool.reset()) CHECK(seen.now.num_steps() == 0);
  }
}

/// Parts of a batch in which row i belongs to env i.
void partial_sends_on_the_full_line() {
  ScriptedPool<false> pool({.num_envs = 9, .num_threads = 3});
  pool.reset();
  Splitmix random(5);
  std::vector<std::int32_t> env_ids{0, 1, 2, 3, 4, 5, 6, 7, 8};
  for (std::int32_t k = 0; k < kNumSteps / 4; ++k) {
    for (std::size_t i = 9; i > 1; --i) std::swap(env_ids[i - 1], env_ids[random.below(i)]);
    for (std::size_t first = 0; first < 9;) {
      const std::size_t end = first + 1 + random.below(9 - first);
      for (std::size_t i = first; i < end; ++i) pool.set_action(env_ids[i], {Command::kGo, 10 * k + env_ids[i]});
      pool.send(
          {env_ids.begin() + static_cast<std::ptrdiff_t>(first), env_ids.begin() + static_cast<std::ptrdiff_t>(end)});
      first = end;
    }
    const Rows rows = pool.receive();
    for (std::int32_t i = 0; i < 9; ++i) {
      const Seen& seen = rows[static_cast<std::size_t>(i)];
      CHECK(seen.env_id == i && seen.now.env_id() == i && seen.now.num_steps() == k + 1 && seen.reward == 10 * k + i);
    }
  }
}

void a_failure_leaves_the_others_alone() {
  for (const std::uint32_t num_threads : {1, 3}) {
    ScriptedPool<false> pool({.num_envs = 4, .num_threads = num_threads});
    pool.reset();
    for (const Command command : {Command::kThrow, Command::kThrowNumber, Command::kThrowAtObserve}) {
      const Rows rows = pool.step({{Command::kGo, 1}, {command, 2}, {Command::kSleep, 3}});
      for (const std::size_t i : {0, 2, 3}) CHECK(rows[i].flags == kComplete && rows[i].reward > 0);
      CHECK(rows[1].flags == (kComplete | kFailed) && rows[1].truncated && rows[1].env_id == 1);
      CHECK(pool.step({{Command::kGo, 1}})[1].now.num_steps() == 0);
    }
  }
}

}  // namespace

std::vector<Test> native_pool_tests() {
  return {
      {"native pool: same rows with any number of threads, next-step", any_number_of_threads<Autoreset::kNextStep>},
      {"native pool: same rows with any number of threads, same-step", any_number_of_threads<Autoreset::kSameStep>},
      {"native pool: same rows with any number of threads, disabled", any_number_of_threads<Autoreset::kDisabled>},
      {"native pool: same rows in runs of envs", runs_of_envs},
      {"native pool: same rows asynchronously, next-step", asynchronously<Autoreset::kNextStep>},
      {"native pool: same rows asynchronously, same-step", asynchronously<Autoreset::kSameStep>},
      {"native pool: partial sends on the full line", partial_sends_on_the_full_line},
      {"native pool: a failure leaves the others alone", a_failure_leaves_the_others_alone},
  };
}

}  // namespace envfleet::test
