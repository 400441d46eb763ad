// TestPool: a parent, what it shares with its children, and the books of what must come back.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "engine/shared_task_queues.h"
#include "tests/check.h"
#include "tests/shared_memory.h"

namespace envfleet::test {

inline constexpr std::uint8_t kFull = 0;        // the line with a row for each env
inline constexpr std::uint8_t kFirstReady = 1;  // the line with smaller batches

/// Each task carries a number that its result must show. A result that is lost, comes twice, is torn or old fails a
/// check, and so does a batch that changes while it is held.
class TestPool {
 public:
  explicit TestPool(TaskQueuesShape shape)
      : shape_(shape),
        memory_(SharedTaskQueues::bytes(shape)),
        seqs_memory_(shape.num_envs * sizeof(std::int64_t)),
        seqs_(reinterpret_cast<std::int64_t*>(seqs_memory_.get())),
        stores_(open_stores()),
        task_queues_(memory_.get(), shape, stores_),
        is_in_flight_(shape.num_envs) {
    task_queues_.clear();
  }

  SharedTaskQueues& task_queues() { return task_queues_; }
  const TaskQueuesShape& shape() const { return shape_; }
  bool is_in_flight(std::int32_t env_id) const { return is_in_flight_[static_cast<std::size_t>(env_id)]; }

  /// The task queues as a thread of a child sees them: the same addresses, so that the thread sanitizer can compare.
  SharedTaskQueues child_thread_queues() { return SharedTaskQueues(memory_.get(), shape_, stores_); }
  /// The task queues as the process of a child sees them: batches are mapped anew.
  SharedTaskQueues child_process_queues() { return SharedTaskQueues(memory_.get(), shape_, open_stores()); }
  /// The task queues as the reporter of deaths sees them.
  SharedTaskQueues reporter_queues() { return SharedTaskQueues(memory_.get(), shape_, {}); }

  // -- the parent --

  std::vector<std::int32_t> idle_env_ids() const {
    std::vector<std::int32_t> env_ids;
    for (std::uint32_t env = 0; env < shape_.num_envs; ++env) {
      if (!is_in_flight_[env]) env_ids.push_back(static_cast<std::int32_t>(env));
    }
    return env_ids;
  }

  void send(const std::vector<std::int32_t>& env_ids, std::uint8_t line) {
    for (const std::int32_t env_id : env_ids) {
      is_in_flight_[static_cast<std::size_t>(env_id)] = true;
      seqs_[env_id] = ++num_sent_;
    }
    const std::vector<Op> ops(env_ids.size(), Op::kStep);
    task_queues_.send(env_ids.data(), ops.data(), env_ids.size(), line);
  }

  /// Take a batch that is full, check it, and hold it while `kNumHeld` more come.
  void receive(std::uint8_t line) {
    const BatchLine::Full full = task_queues_.take(line);
    BatchStore& store = *stores_[line];
    std::byte* memory = store.memory(full.buffer);
    for (std::uint32_t row = 0; row < task_queues_.line(line).batch_size(); ++row) {
      const std::int32_t env_id = store.column<std::int32_t>(memory, kEnvIds)[row];
      const bool is_known = env_id >= 0 && static_cast<std::uint32_t>(env_id) < shape_.num_envs;
      CHECK(is_known);
      if (!is_known) continue;
      CHECK(is_in_flight_[static_cast<std::size_t>(env_id)]);
      is_in_flight_[static_cast<std::size_t>(env_id)] = false;
      const Obs obs = store.column<Obs>(memory, kObs)[row];
      CHECK(obs.env_id == env_id);
      CHECK(obs.seq == seqs_[env_id]);
      CHECK(store.column<double>(memory, kRewards)[row] == static_cast<double>(obs.seq));
      CHECK(store.column<std::uint8_t>(memory, kTerminated)[row] == (obs.seq % 3 == 0));
      CHECK(store.column<std::uint8_t>(memory, kTruncated)[row] == (obs.seq % 5 == 0));
      if (line == kFull) CHECK(static_cast<std::uint32_t>(env_id) == row);
    }
    held_.push_back({line, full.buffer, std::vector<std::byte>(memory, memory + store.layout().buffer_bytes)});
    if (held_.size() > kNumHeld) give_back_one();
  }

  /// Drop all results that were not received; no env may be busy.
  void abandon() {
    task_queues_.abandon();
    is_in_flight_.assign(shape_.num_envs, false);
  }

  void give_back_all() {
    while (!held_.empty()) give_back_one();
    for (const auto& store : stores_) CHECK(store->num_leased() == 0);
  }

  // -- a child --

  /// Do one task; false if it was told to stop.
  bool run(SharedTaskQueues& task_queues, const Task& task, std::uint8_t flags = 0) const {
    if (task.op == Op::kStop) return false;
    if (task.op == Op::kRequest) {
      task_queues.reply();
      return true;
    }
    const std::int64_t seq = seqs_[task.env_id];
    const Place place = task_queues.claim(task.env_id, task.line);
    const std::shared_ptr<BatchStore>& store = task_queues.store(task.line);
    store->column<Obs>(store->memory(place.buffer), kObs)[place.row] = {task.env_id, seq};
    task_queues.complete(task.line, place, {task.env_id, static_cast<double>(seq), seq % 3 == 0, seq % 5 == 0, flags});
    return true;
  }

  /// Do the tasks that are there, without waiting for more.
  void run_all(SharedTaskQueues& task_queues) const {
    while (const std::optional<Task> task = task_queues.try_next_task()) run(task_queues, *task);
  }

  /// A child's loop, until told to stop.
  void serve(SharedTaskQueues task_queues, std::uint32_t child) const {
    task_queues.start_child(child, getpid());
    for (const Deadline deadline = in(5 * kPatience); Clock::now() < deadline;) {
      const std::optional<Task> task = task_queues.try_next_task();
      if (!task) {
        task_queues.wait_for_task(deadline);
      } else if (!run(task_queues, *task)) {
        return;
      }
    }
  }

 private:
  static constexpr std::size_t kNumHeld = 3;
  struct Held {
    std::uint8_t line;
    std::uint32_t buffer;
    std::vector<std::byte> bytes;
  };

  std::vector<std::shared_ptr<BatchStore>> open_stores() const {
    std::vector<std::shared_ptr<BatchStore>> stores;
    stores.push_back(std::make_shared<BatchStore>(files_[kFull].fd(), test_layout(shape_.num_envs)));
    if (shape_.batch_size < shape_.num_envs) {
      stores.push_back(std::make_shared<BatchStore>(files_[kFirstReady].fd(), test_layout(shape_.batch_size)));
    }
    return stores;
  }

  void give_back_one() {
    const Held& held = held_.front();
    CHECK(std::memcmp(stores_[held.line]->memory(held.buffer), held.bytes.data(), held.bytes.size()) == 0);
    stores_[held.line]->give_back(held.buffer);
    held_.pop_front();
  }

  TaskQueuesShape shape_;
  SharedMemory memory_;
  SharedMemory seqs_memory_;
  std::int64_t* seqs_;  // [num_envs] the number of each env's newest task; the parent writes it before it sends
  MemoryFile files_[2];
  std::vector<std::shared_ptr<BatchStore>> stores_;
  SharedTaskQueues task_queues_;
  std::vector<bool> is_in_flight_;  // [num_envs]
  std::int64_t num_sent_ = 0;
  std::deque<Held> held_;
};

/// Some of `env_ids` in any order, but at least `min_size`.
inline std::vector<std::int32_t> random_part(std::vector<std::int32_t> env_ids, std::size_t min_size,
                                             std::mt19937& random) {
  std::shuffle(env_ids.begin(), env_ids.end(), random);
  const std::size_t low = std::min(min_size, env_ids.size());
  env_ids.resize(std::uniform_int_distribution<std::size_t>(low, env_ids.size())(random));
  return env_ids;
}

}  // namespace envfleet::test
