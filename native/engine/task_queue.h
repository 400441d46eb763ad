// TaskQueue: a bounded lock-free queue of tasks in memory that somebody else owns.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <new>

namespace envfleet {

enum class Op : std::uint8_t {
  kStep = 0,     // step the env with its action
  kReset = 1,    // reset the env with its seed, if it has one
  kRepeat = 2,   // write the env's last observation again: the env is not part of a partial reset or step
  kRequest = 3,  // a request lies in this child's part of the object channel
  kStop = 4,     // close the envs and leave
};

/// Which batches a result goes to.
enum Line : std::uint8_t {
  kFull = 0,        // with a row for each env
  kFirstReady = 1,  // smaller ones, of the first that finish
};

/// What one worker does next, for one env or for a run of neighbours. `line` is a Line.
struct Task {
  std::int32_t env_id;  // the first
  Op op;
  std::uint8_t line;
  std::uint16_t num_envs = 1;
};

/// Many producers, many consumers, first in first out, after D. Vyukov's bounded queue: each cell
/// carries the ticket it waits for, so neither side ever takes a lock.
///
/// The queue never overflows by design: an env is in it at most once, so `num_envs` plus a few
/// control tasks are the most it can hold. Still `push` may refuse for a moment: a consumer that was
/// interrupted inside `pop` has not freed its cell yet, and the others went all the way round meanwhile. With
/// several consumers a producer therefore tries again until it is accepted; an only consumer cannot be overtaken.
///
/// A consumer process may be killed anywhere if the queue is cleared before the next one starts. A producer
/// process must not be killed inside `push`: the consumers would wait for its cell.
class TaskQueue {
 public:
  // With a single cell the tickets of a full and of an empty queue would be the same.
  static std::size_t capacity_for(std::size_t num_tasks) { return std::bit_ceil(std::max<std::size_t>(num_tasks, 2)); }
  static std::size_t bytes(std::size_t capacity) { return sizeof(Ends) + capacity * sizeof(Cell); }

  /// A view of the queue at `memory`; call `clear` once before the first use. `capacity` is from `capacity_for`.
  TaskQueue(std::byte* memory, std::size_t capacity)
      : ends_(reinterpret_cast<Ends*>(memory)),
        cells_(reinterpret_cast<Cell*>(memory + sizeof(Ends))),
        mask_(capacity - 1) {}

  /// Make the queue empty. Nobody else may use it meanwhile; whoever is to use it starts afterwards.
  void clear() {
    new (ends_) Ends();
    for (std::size_t i = 0; i <= mask_; ++i) {
      new (&cells_[i]) Cell();
      cells_[i].ticket.store(i, std::memory_order_relaxed);
    }
  }

  bool push(Task task) {
    std::uint64_t ticket = ends_->pushed.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[ticket & mask_];
      const auto lead = static_cast<std::int64_t>(cell.ticket.load(std::memory_order_acquire) - ticket);
      if (lead == 0) {
        if (ends_->pushed.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed)) {
          cell.task = task;
          cell.ticket.store(ticket + 1, std::memory_order_release);
          return true;
        }
      } else if (lead < 0) {
        return false;
      } else {
        ticket = ends_->pushed.load(std::memory_order_relaxed);
      }
    }
  }

  bool is_empty() const {
    for (;;) {
      const std::uint64_t ticket = ends_->popped.load(std::memory_order_relaxed);
      const std::uint64_t found = cells_[ticket & mask_].ticket.load(std::memory_order_acquire);
      // More than a full cell: another consumer was quicker, and there may be tasks behind the one it took.
      if (static_cast<std::int64_t>(found - (ticket + 1)) <= 0) return found != ticket + 1;
    }
  }

  bool pop(Task* task) {
    std::uint64_t ticket = ends_->popped.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[ticket & mask_];
      const auto lead = static_cast<std::int64_t>(cell.ticket.load(std::memory_order_acquire) - (ticket + 1));
      if (lead == 0) {
        if (ends_->popped.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed)) {
          *task = cell.task;
          cell.ticket.store(ticket + mask_ + 1, std::memory_order_release);
          return true;
        }
      } else if (lead < 0) {
        return false;
      } else {
        ticket = ends_->popped.load(std::memory_order_relaxed);
      }
    }
  }

 private:
  struct Ends {
    alignas(64) std::atomic<std::uint64_t> pushed{0};
    alignas(64) std::atomic<std::uint64_t> popped{0};
  };
  struct Cell {
    std::atomic<std::uint64_t> ticket{0};
    Task task{};
  };

  Ends* ends_;
  Cell* cells_;
  std::uint64_t mask_;
};

}  // namespace envfleet
