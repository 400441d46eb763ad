// FairQueue: which of a child's ready envs is stepped next when not all results are waited for.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <queue>
#include <vector>

#include "engine/gate.h"
#include "engine/task_queue.h"

namespace envfleet {

/// Start-time fair queueing: envs share a child's time, not its steps. In first-in-first-out order an
/// env that takes 20 times longer than the others takes 20 times their share, and in asynchronous mode
/// everybody waits for it; here it is stepped as often as its share allows, and never starves.
///
/// Tasks whose batch waits for every env (line 0) keep their order: there is nothing to gain. Private
/// to one child.
class FairQueue {
 public:
  explicit FairQueue(std::size_t num_envs) : finish_ns_(num_envs, 0) {}

  void push(Task task) {
    std::int64_t start_ns = now_ns_;
    if (task.op == Op::kRequest || task.op == Op::kStop) {
      start_ns = kBeforeAllEnvs;
    } else if (task.line != 0) {
      start_ns = std::max(now_ns_, finish_ns_[task.env_id]);
    }
    ready_.push({start_ns, num_pushed_++, task});
  }

  bool empty() const { return ready_.empty(); }

  Task pop(Clock::time_point now) {
    const Ready next = ready_.top();
    ready_.pop();
    now_ns_ = std::max(now_ns_, next.start_ns);
    running_ = next.task;
    running_start_ns_ = next.start_ns;
    running_since_ = now;
    return next.task;
  }

  /// The task that `pop` returned last has ended: charge its env.
  void finished(Clock::time_point now) {
    if (running_.line == 0) return;
    const auto took = std::chrono::duration_cast<std::chrono::nanoseconds>(now - running_since_);
    finish_ns_[running_.env_id] = running_start_ns_ + std::min(took, kMostCharged).count();
    running_.line = 0;
  }

 private:
  // After a reset of half a minute an env would otherwise wait until each of its siblings had as much.
  static constexpr std::chrono::nanoseconds kMostCharged = std::chrono::seconds(1);
  static constexpr std::int64_t kBeforeAllEnvs = -1;  // virtual time starts at 0, and stays there with line 0 alone

  struct Ready {
    std::int64_t start_ns;
    std::uint64_t order;  // first in first out among equals
    Task task;
    bool operator<(const Ready& other) const {  // std::priority_queue takes the greatest first
      return start_ns != other.start_ns ? start_ns > other.start_ns : order > other.order;
    }
  };

  std::priority_queue<Ready> ready_;
  std::vector<std::int64_t> finish_ns_;  // [num_envs] virtual time at which the env has used up its share
  std::int64_t now_ns_ = 0;              // virtual time: the start of the task that runs
  std::uint64_t num_pushed_ = 0;
  Task running_{};
  std::int64_t running_start_ns_ = 0;
  Clock::time_point running_since_{};
};

}  // namespace envfleet
