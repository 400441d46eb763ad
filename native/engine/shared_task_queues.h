// SharedTaskQueues: what a process pool's parent and children share besides arrays: tasks, states, who lives.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "engine/batch_line.h"
#include "engine/batch_store.h"
#include "engine/fair_queue.h"
#include "engine/gate.h"
#include "engine/task_queue.h"

namespace envfleet {

/// Parent and children must agree on these.
struct TaskQueuesShape {
  std::uint32_t num_envs;
  std::uint32_t num_children;
  std::uint32_t batch_size;  // of line 1; equal to num_envs if there is no line 1
};

/// How a wait of the parent ended. News: an env failed or a child died since the parent last asked.
enum class Waiting { kReady, kNews, kTimedOut, kInterrupted };

/// What a child does at this moment, for the report on a step that hangs.
struct Doing {
  std::int32_t env_id;  // -1: nothing, or something for all its envs
  Op op;
  double for_s;  // since when
};

/// One piece of shared memory that the parent clears before any child starts. Child c runs the envs
/// [c * N / C, (c + 1) * N / C). Line 0 has batches with a row for each env; line 1, if
/// batch_size < num_envs, has smaller ones.
///
/// Long, but one class: the parent's side, the children's and the reaper's write what the others read, and stand here
/// one below the other so that both ends of each word can be seen.
class SharedTaskQueues {
 public:
  static std::size_t bytes(const TaskQueuesShape& shape) { return Plan(shape).total; }

  SharedTaskQueues(std::byte* memory, const TaskQueuesShape& shape, std::vector<std::shared_ptr<BatchStore>> stores)
      : shape_(shape),
        stores_(std::move(stores)),
        child_of_(shape.num_envs),
        in_flight_(shape.num_envs),
        failure_is_told_(shape.num_envs) {
    const Plan plan(shape);
    shared_ = reinterpret_cast<Shared*>(memory);
    envs_ = reinterpret_cast<Env*>(memory + plan.envs);
    children_ = reinterpret_cast<Child*>(memory + plan.children);
    for (std::uint32_t child = 0; child < shape.num_children; ++child) {
      queues_.emplace_back(memory + plan.queues + child * plan.queue_bytes, plan.queue_capacity);
      for (std::uint32_t env = first_env(child); env < first_env(child + 1); ++env) child_of_[env] = child;
    }
    for (std::size_t i = 0; i < stores_.size(); ++i) {
      lines_.emplace_back(memory + plan.lines[i], shape.num_envs, stores_[i].get());
    }
  }

  const TaskQueuesShape& shape() const { return shape_; }
  BatchLine& line(std::size_t i) { return lines_[i]; }
  std::size_t num_lines() const { return lines_.size(); }
  const std::shared_ptr<BatchStore>& store(std::size_t i) const { return stores_[i]; }
  std::uint32_t child_of(std::uint32_t env_id) const { return child_of_[env_id]; }
  std::uint32_t first_env(std::uint32_t child) const {
    return static_cast<std::uint32_t>(std::uint64_t{child} * shape_.num_envs / shape_.num_children);
  }

  // -- the parent --

  void clear() {
    new (shared_) Shared();
    for (std::uint32_t i = 0; i < shape_.num_envs; ++i) new (&envs_[i]) Env();
    for (std::uint32_t i = 0; i < shape_.num_children; ++i) clear_child(i);
    for (BatchLine& line : lines_) line.clear();
  }

  /// Before a child starts, also in the place of one that died.
  void clear_child(std::uint32_t child) {
    new (&children_[child]) Child();
    queues_[child].clear();
  }

  void set_seed(std::uint32_t env_id, std::optional<std::uint64_t> seed) {
    envs_[env_id].has_seed = seed.has_value();
    envs_[env_id].seed = seed.value_or(0);
  }

  /// Give each env a task. All must be idle. A child is woken once, whatever the number of its envs.
  void send(const std::int32_t* env_ids, const Op* ops, std::size_t num_tasks, std::uint8_t line) {
    lines_[line].open_for(static_cast<std::uint32_t>(num_tasks));
    std::int64_t unwoken = -1;
    for (std::size_t i = 0; i < num_tasks; ++i) {
      const Task task{env_ids[i], ops[i], line};
      in_flight_[task.env_id] = task;
      const std::uint32_t child = child_of_[task.env_id];
      queues_[child].push(task);
      if (unwoken >= 0 && unwoken != child) children_[unwoken].gate.open();
      unwoken = child;
    }
    if (unwoken >= 0) children_[unwoken].gate.open();
  }

  /// What wait_full would return at once, if anything.
  std::optional<Waiting> poll_full(std::uint8_t line) const {
    if (has_news()) return Waiting::kNews;
    if (!lines_[line].is_full()) return std::nullopt;
    // A batch with a failed row stays until that was told. The child reports the news after the row, so
    // they may not be here yet.
    const bool has_failed_row = lines_[line].oldest().flags & kFailed;
    return has_failed_row && find_untold_failure() ? Waiting::kNews : Waiting::kReady;
  }

  Waiting wait_full(std::uint8_t line, Deadline deadline) {
    return wait_for([&] { return poll_full(line); }, deadline);
  }

  bool has_news() const { return shared_->num_news.load(std::memory_order_acquire) != num_news_seen_; }

  /// Take the oldest batch of the line, which is full, and let its envs be used again.
  BatchLine::Full take(std::uint8_t line) {
    const BatchLine::Full full = lines_[line].take();
    const auto* env_ids = stores_[line]->column<std::int32_t>(stores_[line]->memory(full.buffer), kEnvIds);
    for (std::uint32_t row = 0; row < lines_[line].batch_size(); ++row) {
      in_flight_[env_ids[row]].reset();
      failure_is_told_[env_ids[row]] = false;
    }
    return full;
  }

  /// Give up all results that nobody received. No env may be busy.
  void abandon() {
    for (BatchLine& line : lines_) line.abandon();
    std::fill(in_flight_.begin(), in_flight_.end(), std::nullopt);
    std::fill(failure_is_told_.begin(), failure_is_told_.end(), false);
  }

  /// Envs with a task whose result is not there yet.
  std::vector<std::int32_t> busy_env_ids() const {
    std::vector<bool> is_busy(shape_.num_envs);
    for (std::uint32_t i = 0; i < shape_.num_envs; ++i) is_busy[i] = in_flight_[i].has_value();
    for (const BatchLine& line : lines_) {
      line.visit_complete_rows([&](std::uint8_t, std::int32_t env_id) { is_busy[env_id] = false; });
    }
    std::vector<std::int32_t> env_ids;
    for (std::uint32_t i = 0; i < shape_.num_envs; ++i) {
      if (is_busy[i]) env_ids.push_back(static_cast<std::int32_t>(i));
    }
    return env_ids;
  }

  /// An env that raised and whose row nobody has received yet. Each failure is returned once, and until then
  /// wait_full does not give its batch away.
  std::optional<std::int32_t> next_failed_env() {
    const std::optional<std::int32_t> env_id = find_untold_failure();
    if (env_id) failure_is_told_[*env_id] = true;
    return env_id;
  }

  void post_request(std::uint32_t child) { post(child, Op::kRequest); }
  void post_stop(std::uint32_t child) { post(child, Op::kStop); }

  Waiting wait_replies(std::uint32_t child, std::uint32_t num_replies, Deadline deadline) {
    const auto poll = [&]() -> std::optional<Waiting> {
      if (children_[child].num_replies.load(std::memory_order_acquire) >= num_replies) return Waiting::kReady;
      if (has_news()) return Waiting::kNews;
      return std::nullopt;
    };
    return wait_for(poll, deadline);
  }

  /// Is there a core to spare for a parent that spins, or do the children need them all?
  void let_parent_spin(bool may_spin) { parent_may_spin_ = may_spin; }

  /// The children that died since the last call, each with its wait status. All news count as seen.
  std::vector<std::pair<std::uint32_t, int>> take_exits() {
    num_news_seen_ = shared_->num_news.load(std::memory_order_acquire);
    std::vector<std::pair<std::uint32_t, int>> exits;
    for (std::uint32_t i = 0; i < shape_.num_children; ++i) {
      if (children_[i].has_exited.exchange(false, std::memory_order_acq_rel)) {
        exits.emplace_back(i, children_[i].exit_status);
      }
    }
    return exits;
  }

  /// A child died. Clear its place for the next one, who finds all tasks that the dead one left
  /// unfinished in its queue. Returns their envs, the one it was at work on first.
  std::vector<std::int32_t> recover(std::uint32_t child) {
    for (BatchLine& line : lines_) line.writer_died();
    std::vector<std::int32_t> unfinished;
    std::optional<Orphan> orphan;
    for (std::uint8_t line = 0; line < lines_.size(); ++line) {
      std::vector<std::int32_t> env_ids;
      for (std::uint32_t env = first_env(child); env < first_env(child + 1); ++env) {
        if (in_flight_[env] && in_flight_[env]->line == line) env_ids.push_back(static_cast<std::int32_t>(env));
      }
      lines_[line].rows_of(child, env_ids, [&](const Place& place, bool is_complete, std::int32_t env_id) {
        if (is_complete) {
          std::erase(env_ids, env_id);
        } else if (!lines_[line].row_is_env()) {
          orphan = Orphan{true, line, place};
        }
      });
      unfinished.insert(unfinished.end(), env_ids.begin(), env_ids.end());
    }
    const std::int32_t culprit = children_[child].doing_env_id.load(std::memory_order_acquire);
    const auto found = std::find(unfinished.begin(), unfinished.end(), culprit);
    if (found != unfinished.end()) std::iter_swap(unfinished.begin(), found);
    clear_child(child);
    if (orphan) children_[child].orphan = *orphan;
    for (const std::int32_t env_id : unfinished) queues_[child].push(*in_flight_[env_id]);
    return unfinished;
  }

  /// A task never seems older than it is: one that has just begun does not have the time of the one before.
  Doing doing(std::uint32_t child) const {
    const Child& entry = children_[child];
    const std::int32_t env_id = entry.doing_env_id.load(std::memory_order_acquire);  // first: see note_doing
    const auto since =
        Clock::time_point(std::chrono::nanoseconds(entry.doing_since_ns.load(std::memory_order_acquire)));
    return {env_id, entry.doing_op.load(std::memory_order_acquire),
            std::chrono::duration<double>(Clock::now() - since).count()};
  }

  std::int32_t pid(std::uint32_t child) const { return children_[child].pid.load(std::memory_order_acquire); }

  // -- whoever reaps the children --

  void report_exit(std::uint32_t child, int status) {
    children_[child].exit_status = status;
    children_[child].has_exited.store(true, std::memory_order_release);
    report_news();
  }

  // -- a child; one thread --

  void start_child(std::uint32_t child, std::int32_t pid) {
    child_ = child;
    fair_queue_.emplace(shape_.num_envs);
    children_[child].pid.store(pid, std::memory_order_release);
  }

  /// The next task without waiting, if there is one.
  std::optional<Task> try_next_task() {
    const Clock::time_point now = Clock::now();
    fair_queue_->finished(now);
    Task task;
    while (queues_[child_].pop(&task)) fair_queue_->push(task);
    if (fair_queue_->empty()) {
      note_doing(-1, Op::kRequest, now);
      return std::nullopt;
    }
    task = fair_queue_->pop(now);
    note_doing(task.env_id, task.op, now);
    return task;
  }

  Waited wait_for_task(Deadline deadline) {
    const Clock::time_point start = Clock::now();
    const auto has_task = [&] { return !queues_[child_].is_empty(); };
    const Waited waited = children_[child_].gate.wait(has_task, deadline, patience_.spin());
    patience_.waited(Clock::now() - start);
    return waited;
  }

  std::optional<std::uint64_t> seed(std::uint32_t env_id) const {
    if (!envs_[env_id].has_seed) return std::nullopt;
    return envs_[env_id].seed;
  }

  Place claim(std::int32_t env_id, std::uint8_t line) {
    Orphan& orphan = children_[child_].orphan;
    if (orphan.is_set && orphan.line == line) {
      orphan.is_set = false;
      return orphan.place;
    }
    return lines_[line].claim(env_id, child_);
  }

  void complete(std::uint8_t line, const Place& place, const RowResult& result) {
    const bool filled = lines_[line].complete(place, result);
    if (result.flags & kFailed) {
      report_news();
    } else if (filled) {
      shared_->results.open();
    }
  }

  void reply() {
    children_[child_].num_replies.fetch_add(1, std::memory_order_acq_rel);
    shared_->results.open();
  }

  /// How often an env has failed since it last finished an episode; outlives the child that runs it.
  std::atomic<std::uint32_t>& num_failures(std::uint32_t env_id) { return envs_[env_id].num_failures; }

 private:
  struct Shared {
    Gate results;                                        // the parent waits here for all it waits for
    alignas(64) std::atomic<std::uint32_t> num_news{0};  // failures and exits so far
  };
  struct Env {
    bool has_seed{false};   // for the next reset; the parent writes it before it sends
    std::uint64_t seed{0};  // likewise
    std::atomic<std::uint32_t> num_failures{0};
  };
  /// A row that a child took and did not complete before it was killed; the next child fills it first.
  struct Orphan {
    bool is_set{false};
    std::uint8_t line{0};
    Place place{};
  };
  struct alignas(64) Child {
    Gate gate;  // the child waits here for tasks
    std::atomic<std::uint32_t> num_replies{0};
    std::atomic<std::int32_t> pid{0};
    std::atomic<std::int32_t> doing_env_id{-1};
    std::atomic<Op> doing_op{Op::kRequest};
    std::atomic<std::int64_t> doing_since_ns{0};
    Orphan orphan;       // the parent writes it before the child starts
    int exit_status{0};  // written before has_exited
    std::atomic<bool> has_exited{false};
  };

  /// Where each part lies in the memory.
  struct Plan {
    explicit Plan(const TaskQueuesShape& shape) {
      std::size_t end = 0;
      const auto add = [&end](std::size_t bytes) {
        const std::size_t start = end;
        end = (end + bytes + 63) / 64 * 64;
        return start;
      };
      add(sizeof(Shared));
      envs = add(shape.num_envs * sizeof(Env));
      children = add(shape.num_children * sizeof(Child));
      queue_capacity = TaskQueue::capacity_for((shape.num_envs - 1) / shape.num_children + 1 + kMaxControlTasks);
      queue_bytes = (TaskQueue::bytes(queue_capacity) + 63) / 64 * 64;
      queues = add(shape.num_children * queue_bytes);
      lines[0] = add(BatchLine::bytes(shape.num_envs, shape.num_envs));
      lines[1] = add(BatchLine::bytes(shape.num_envs, shape.batch_size));
      total = end;
    }
    static constexpr std::size_t kMaxControlTasks = 4;  // one request and one stop, with room to spare
    std::size_t envs, children, queues, queue_capacity, queue_bytes, total;
    std::size_t lines[2];
  };

  template <class Poll>
  Waiting wait_for(Poll&& poll, Deadline deadline) {
    std::optional<Waiting> outcome;
    const Clock::time_point start = Clock::now();
    const auto spin = parent_may_spin_ ? patience_.spin() : std::chrono::nanoseconds(0);
    const auto is_over = [&] { return (outcome = poll()).has_value(); };
    const Waited waited = shared_->results.wait(is_over, deadline, spin);
    patience_.waited(Clock::now() - start);
    if (outcome) return *outcome;
    return waited == Waited::kInterrupted ? Waiting::kInterrupted : Waiting::kTimedOut;
  }

  void post(std::uint32_t child, Op op) {
    queues_[child].push({-1, op, 0});
    children_[child].gate.open();
  }

  std::optional<std::int32_t> find_untold_failure() const {
    std::optional<std::int32_t> found;
    for (const BatchLine& line : lines_) {
      line.visit_complete_rows([&](std::uint8_t flags, std::int32_t env_id) {
        if (!found && (flags & kFailed) && !failure_is_told_[env_id]) found = env_id;
      });
    }
    return found;
  }

  void report_news() {
    shared_->num_news.fetch_add(1, std::memory_order_acq_rel);
    shared_->results.open();
  }

  void note_doing(std::int32_t env_id, Op op, Clock::time_point now) {
    Child& entry = children_[child_];
    entry.doing_since_ns.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    entry.doing_op.store(op, std::memory_order_relaxed);
    entry.doing_env_id.store(env_id, std::memory_order_release);  // last: who reads it reads its time, or a later one
  }

  TaskQueuesShape shape_;
  std::vector<std::shared_ptr<BatchStore>> stores_;  // one for each line
  std::vector<std::uint32_t> child_of_;              // [num_envs]
  Shared* shared_;
  Env* envs_;
  Child* children_;
  std::vector<TaskQueue> queues_;  // one for each child
  std::vector<BatchLine> lines_;

  // The parent's own.
  std::vector<std::optional<Task>> in_flight_;  // [num_envs] the task whose result was not received
  std::vector<bool> failure_is_told_;           // [num_envs] by next_failed_env, while the row is not received
  std::uint32_t num_news_seen_ = 0;
  bool parent_may_spin_ = false;

  // The parent's or the child's, whichever this object serves.
  Patience patience_;

  // A child's own.
  std::uint32_t child_ = 0;
  std::optional<FairQueue> fair_queue_;
};

}  // namespace envfleet
