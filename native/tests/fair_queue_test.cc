// FairQueue: envs share time, nobody starves, and what is not to be reordered is not.
#include "engine/fair_queue.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "tests/check.h"

namespace envfleet::test {
namespace {

using std::chrono::microseconds;

Task step(std::int32_t env_id, std::uint8_t line = 1) { return {env_id, Op::kStep, line}; }

/// One child with a clock of its own. Envs are sent again as soon as they are done.
class Child {
 public:
  explicit Child(std::vector<microseconds> costs)
      : num_steps(costs.size()),
        time_spent(costs.size()),
        longest_gap(costs.size()),
        costs_(std::move(costs)),
        last_end_(costs_.size()),
        queue_(costs_.size()) {}

  void send(std::int32_t env_id) { queue_.push(step(env_id)); }
  void send_all() {
    for (std::size_t i = 0; i < costs_.size(); ++i) send(static_cast<std::int32_t>(i));
  }

  /// Returns the env that was stepped.
  std::int32_t run_one() {
    queue_.finished(now_);
    const Task task = queue_.pop(now_);
    const auto env = static_cast<std::size_t>(task.env_id);
    longest_gap[env] = std::max(longest_gap[env], now_ - last_end_[env]);
    now_ += costs_[env];
    last_end_[env] = now_;
    time_spent[env] += costs_[env];
    ++num_steps[env];
    return task.env_id;
  }

  void run_for(microseconds time) {
    for (const auto end = now_ + time; now_ < end;) {
      const std::int32_t env_id = run_one();
      queue_.finished(now_);
      send(env_id);
    }
  }

  std::vector<std::int64_t> num_steps;
  std::vector<Clock::duration> time_spent;
  std::vector<Clock::duration> longest_gap;  // from one step's end to the next one's start

 private:
  std::vector<microseconds> costs_;
  Clock::time_point now_{};
  std::vector<Clock::time_point> last_end_;
  FairQueue queue_;
};

void equal_shares_of_time() {
  std::vector<microseconds> costs(8, microseconds(100));
  costs[3] = microseconds(2'000);
  Child child(costs);
  child.send_all();
  child.run_for(std::chrono::seconds(16));
  for (std::size_t env = 0; env < costs.size(); ++env) {
    const double share = std::chrono::duration<double>(child.time_spent[env]).count() / 16.0;
    CHECK(share > 0.95 / 8 && share < 1.05 / 8);
  }
  const double ratio = static_cast<double>(child.num_steps[0]) / static_cast<double>(child.num_steps[3]);
  CHECK(ratio > 19 && ratio < 21);
}

void nobody_starves() {
  std::vector<microseconds> costs;
  for (int env = 0; env < 6; ++env) costs.push_back(microseconds(10 << (2 * env)));  // 10 us to 10 ms
  Child child(costs);
  child.send_all();
  child.run_for(std::chrono::seconds(5));
  for (std::size_t env = 0; env < costs.size(); ++env) {
    // After a step of cost c all others may use up c each, and each may overshoot by one step of its own.
    const auto bound = (costs.size() - 1) * (costs[env] + costs.back());
    CHECK(child.num_steps[env] > 0 && child.longest_gap[env] <= bound);
  }
}

void an_idle_env_saves_nothing_up() {
  Child child(std::vector<microseconds>(4, microseconds(100)));
  for (std::int32_t env = 0; env < 3; ++env) child.send(env);
  child.run_for(std::chrono::seconds(1));
  child.send(3);  // late: it must not get all the time that it did not use
  const std::int64_t before = child.num_steps[0];
  child.run_for(std::chrono::milliseconds(100));
  CHECK(child.num_steps[3] >= 249 && child.num_steps[3] <= 251);
  CHECK(child.num_steps[0] - before >= 249);
}

void an_env_in_debt_runs_if_it_is_alone() {
  Child child({microseconds(1'000'000), microseconds(10)});
  child.send_all();
  CHECK(child.run_one() == 0);
  CHECK(child.run_one() == 1);
  child.send(0);
  CHECK(child.run_one() == 0);
}

void full_batches_keep_their_order() {
  FairQueue queue(4);
  Clock::time_point now{};
  // Debts from asynchronous steps do not matter on line 0.
  for (std::int32_t env = 0; env < 4; ++env) queue.push(step(env));
  for (int i = 0; i < 4; ++i) {
    now += microseconds(10 * queue.pop(now).env_id);
    queue.finished(now);
  }
  for (int round = 0; round < 3; ++round) {
    for (const std::int32_t env : {3, 0, 2, 1}) queue.push(step(env, 0));
    for (const std::int32_t env : {3, 0, 2, 1}) {
      CHECK(queue.pop(now).env_id == env);
      now += microseconds(100 * env);
      queue.finished(now);
    }
  }
  CHECK(queue.empty());
}

void requests_go_first() {
  for (const std::uint8_t line : {0, 1}) {
    FairQueue queue(2);
    Clock::time_point now{};
    for (int round = 0; round < 3; ++round) {
      queue.push(step(0, line));
      queue.push(step(1, line));
      queue.push({-1, Op::kRequest, 0});
      queue.push({-2, Op::kRequest, 0});
      queue.push({-3, Op::kStop, 0});
      for (const std::int32_t expected : {-1, -2, -3, 0, 1}) {
        CHECK(queue.pop(now).env_id == expected);
        now += microseconds(10);
        queue.finished(now);
      }
    }
  }
}

}  // namespace

std::vector<Test> fair_queue_tests() {
  return {
      {"fair queue: equal shares of time", equal_shares_of_time},
      {"fair queue: nobody starves", nobody_starves},
      {"fair queue: an idle env saves nothing up", an_idle_env_saves_nothing_up},
      {"fair queue: an env in debt runs if it is alone", an_env_in_debt_runs_if_it_is_alone},
      {"fair queue: full batches keep their order", full_batches_keep_their_order},
      {"fair queue: requests go first", requests_go_first},
  };
}

}  // namespace envfleet::test
