// NativePool: native envs, stepped by the calling thread and, where it is worth waking them, by helper threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "engine/batch_line.h"
#include "engine/env_array.h"
#include "engine/gate.h"
#include "engine/task_queue.h"

namespace envfleet {

struct NativePoolConfig {
  std::uint32_t num_threads;     // the calling one included
  std::vector<int> helper_cpus;  // CPU of each helper; empty: the kernel chooses
  // Wake helpers for this much work: less is done sooner by the caller alone. Helpers that are awake are given work
  // from a twelfth of it.
  std::chrono::nanoseconds help_worth;
};

/// The path of a step: send() queues runs of envs; recv() works on them until a batch is full, beside the helpers if
/// send() has called them; whoever writes the last row of a batch opens the gate.
///
/// How long a step takes is measured, and decides both: a batch that is done in a few microseconds stays with the
/// caller (to wake a thread costs more than that), and the longer a step, the shorter the runs, so that no thread is
/// left without work at the end. Helpers start with the first call for help.
///
/// Threads share this object with its owner, who calls close(): an env that never returns keeps only its thread.
class NativePool : public std::enable_shared_from_this<NativePool> {
 public:
  /// Line 0 has batches with a row for each env. Line 1, if there is one, has smaller batches of the first to finish.
  NativePool(std::unique_ptr<EnvArray> envs, std::vector<std::shared_ptr<BatchStore>> stores,
             std::vector<std::size_t> action_row_bytes, NativePoolConfig config);
  NativePool(const NativePool&) = delete;
  NativePool& operator=(const NativePool&) = delete;
  ~NativePool();

  EnvArray& envs() { return *envs_; }
  const std::shared_ptr<BatchStore>& store(std::uint8_t line) const { return stores_[line]; }
  std::size_t num_lines() const { return lines_.size(); }

  // -- the owner's, one thread at a time --

  /// The action of env i is row i of each column.
  std::byte* action_column(std::size_t leaf) { return actions_.memory.get() + action_fields_[leaf].offset; }
  const std::vector<Field>& action_fields() const { return action_fields_; }
  /// For the resets that are sent next. Nothing may be in flight.
  void set_options(Kwargs options) { options_ = std::move(options); }

  /// Queue a task for each of `num_envs` envs; the actions are in their columns. `env_ids` null: all, in order.
  void send(const std::int32_t* env_ids, std::size_t num_envs, Op op, std::uint8_t line);
  /// Queue one task for each env, each with its own op.
  void send_all(const std::vector<Op>& ops, std::uint8_t line);

  /// Work until the oldest batch of the line is full. Returns early (kInterrupted) after a signal.
  Waited recv(std::uint8_t line, Deadline deadline);
  BatchLine::Full peek(std::uint8_t line) const { return lines_[line].oldest(); }
  /// Take the batch for which recv() returned kReady. Its buffer stays leased.
  BatchLine::Full take(std::uint8_t line) { return lines_[line].take(); }

  /// Finish all tasks, and forget their results. False if the deadline came first.
  bool drain(Deadline deadline);

  /// First and last env of the runs that helpers are working on.
  std::vector<std::pair<std::int32_t, std::int32_t>> runs_under_way() const;

  /// Stop the helpers. False if one of them did not stop in time; it keeps its memory, and ends when its env returns.
  bool close(Deadline deadline);

  std::size_t num_helpers() const { return num_started_; }
  double step_cost_ns() const { return cost_ns_[static_cast<std::size_t>(Op::kStep)]; }

 private:
  static constexpr std::size_t kCacheLine = 64;
  static constexpr std::chrono::milliseconds kBetweenTries{5};
  /// Zeroed memory that begins at a cache line.
  struct Memory {
    explicit Memory(std::size_t num_bytes)
        : memory(static_cast<std::byte*>(::operator new(num_bytes, std::align_val_t(kCacheLine)))) {
      std::memset(memory.get(), 0, num_bytes);
    }
    struct Free {
      void operator()(std::byte* bytes) const { ::operator delete(bytes, std::align_val_t(kCacheLine)); }
    };
    std::unique_ptr<std::byte, Free> memory;
  };
  /// A thread beside the calling one.
  struct alignas(kCacheLine) Helper {
    Gate gate;                                // opened by a call, and when the pool closes
    std::atomic<std::uint32_t> num_calls{0};  // for help
    std::atomic<bool> is_awake{false};        // at work, or spinning: a call costs next to nothing
    std::atomic<std::uint64_t> run{0};        // at work on: first env << 32 | number of envs; 0: nothing
    std::thread thread;
  };

  double work_ns(std::size_t num_envs, Op op) const;
  std::size_t num_worth_calling(double work_ns);
  std::size_t run_length(std::size_t num_envs, Op op, std::uint8_t line, std::size_t num_called) const;
  void push(const Task& task);
  void call(std::size_t num_called, double work_ns);
  void call_if_much_is_left(const Task& done);
  void start_helpers();
  void help(std::uint32_t writer);
  bool wait_for_call(Helper& helper, std::uint32_t num_calls);
  Clock::time_point work(const Task& task);
  void note_cost(const Task& task, std::chrono::nanoseconds total);
  bool was_forked() const;
  void require_not_forked() const;

  std::unique_ptr<EnvArray> envs_;
  std::vector<std::shared_ptr<BatchStore>> stores_;
  NativePoolConfig config_;
  std::vector<Field> action_fields_;
  Memory actions_;
  Kwargs options_;
  TaskContext context_;

  std::vector<Memory> line_memory_;
  std::vector<BatchLine> lines_;
  Memory queue_memory_;
  TaskQueue queue_;

  // What a task costs for one env, as the calling thread sees it: a moving average for each Op. 0: not known yet.
  std::array<double, 3> cost_ns_{};
  std::size_t num_left_ = 0;  // envs that were sent without a call for help, and not stepped yet
  Patience patience_;         // of the calling thread
  Patience between_batches_;  // of helpers, as far as the calling thread makes them wait
  Clock::time_point idle_since_{};

  const int owner_pid_;
  std::vector<Helper> helpers_;  // as many as there may be; those without a thread have not started
  std::size_t num_started_ = 0;  // the owner's
  std::size_t num_available_;    // started, or worth an attempt
  // When a helper was last woken for little work, to see whether it can be kept awake. Not at once: the first steps
  // are slower than all others.
  Clock::time_point last_try_ = Clock::now();
  std::chrono::milliseconds between_tries_ = kBetweenTries;
  std::atomic<std::int64_t> spin_ns_{0};  // how long helpers wait awake for the next call
  std::atomic<bool> is_stopping_{false};
  std::atomic<std::uint32_t> num_running_{0};
  alignas(kCacheLine) Gate gate_;  // opened when a batch may be full, and when a helper ends
};

}  // namespace envfleet
