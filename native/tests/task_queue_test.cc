// TaskQueue: first in first out, nothing lost, nothing twice, and never called empty while it is not.
#include "engine/task_queue.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <new>
#include <thread>
#include <vector>

#include "engine/gate.h"
#include "tests/check.h"

namespace envfleet::test {
namespace {

/// A queue with memory of its own.
class OwnedQueue {
 public:
  explicit OwnedQueue(std::size_t num_tasks)
      : capacity_(TaskQueue::capacity_for(num_tasks)), lines_(TaskQueue::bytes(capacity_) / sizeof(CacheLine) + 1) {
    get().clear();
  }
  std::size_t capacity() const { return capacity_; }
  TaskQueue get() { return {reinterpret_cast<std::byte*>(lines_.data()), capacity_}; }

 private:
  struct alignas(64) CacheLine {
    std::byte bytes[64];
  };
  std::size_t capacity_;
  std::vector<CacheLine> lines_;
};

Task task(std::int32_t env_id) { return {env_id, Op::kStep, 0}; }

void first_in_first_out() {
  OwnedQueue owned(8);
  TaskQueue queue = owned.get();
  Task popped{};
  CHECK(queue.is_empty());
  CHECK(!queue.pop(&popped));
  for (std::int32_t i = 0; i < 8; ++i) CHECK(queue.push({i, Op::kReset, 1}));
  CHECK(!queue.is_empty());
  for (std::int32_t i = 0; i < 8; ++i) {
    CHECK(queue.pop(&popped));
    CHECK(popped.env_id == i && popped.op == Op::kReset && popped.line == 1);
  }
  CHECK(queue.is_empty());
  CHECK(!queue.pop(&popped));
}

void refuses_when_full() {
  for (const std::size_t num_tasks : {1, 2, 3, 5, 64}) {
    OwnedQueue owned(num_tasks);
    TaskQueue queue = owned.get();
    CHECK(owned.capacity() >= num_tasks);
    const auto capacity = static_cast<std::int32_t>(owned.capacity());
    for (std::int32_t i = 0; i < capacity; ++i) CHECK(queue.push(task(i)));
    CHECK(!queue.push(task(-1)));
    Task popped{};
    CHECK(queue.pop(&popped) && popped.env_id == 0);
    CHECK(queue.push(task(capacity)));
    CHECK(!queue.push(task(-1)));
    for (std::int32_t i = 1; i <= capacity; ++i) CHECK(queue.pop(&popped) && popped.env_id == i);
    CHECK(queue.is_empty());
  }
}

void goes_round_many_times() {
  OwnedQueue owned(4);
  TaskQueue queue = owned.get();
  std::int32_t pushed = 0, popped = 0;
  Task got{};
  for (int round = 0; round < 10'000; ++round) {
    for (int i = 0; i <= round % 4; ++i) CHECK(queue.push(task(pushed++)));
    while (queue.pop(&got)) CHECK(got.env_id == popped++);
  }
  CHECK(pushed == popped);
}

void clear_forgets() {
  OwnedQueue owned(4);
  TaskQueue queue = owned.get();
  for (std::int32_t i = 0; i < 3; ++i) queue.push(task(i));
  queue.clear();
  CHECK(queue.is_empty());
  Task popped{};
  CHECK(queue.push(task(7)) && queue.pop(&popped) && popped.env_id == 7);
}

/// Each task is a producer's number and its count, so that a consumer can check the order.
void many_producers_and_consumers() {
  constexpr int kProducers = 3, kConsumers = 3;
  const std::int32_t num_each = 200'000 / kSlowdown;
  OwnedQueue owned(16);  // small: often full, often empty
  Gate gate;
  std::atomic<int> num_left{kProducers * num_each};
  std::vector<std::atomic<std::uint8_t>> times_seen(static_cast<std::size_t>(num_left.load()));
  std::vector<std::jthread> threads;
  for (int producer = 0; producer < kProducers; ++producer) {
    threads.emplace_back([&, producer, queue = owned.get()]() mutable {
      const Deadline deadline = patience();
      for (std::int32_t i = 0; i < num_each; ++i) {
        while (!queue.push({producer * num_each + i, Op::kStep, static_cast<std::uint8_t>(producer)})) {
          if (Clock::now() > deadline) return CHECK(!"the queue stays full");
          std::this_thread::yield();
        }
        gate.open();
      }
    });
  }
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    threads.emplace_back([&, queue = owned.get()]() mutable {
      std::int32_t last[kProducers] = {-1, -1, -1};
      Task got{};
      while (num_left.load() > 0 && num_failed_checks() == 0) {
        const auto has_work = [&] { return num_left.load() <= 0 || !queue.is_empty(); };
        CHECK_WOKEN(gate.wait(has_work, patience(), std::chrono::microseconds(1)) == Waited::kReady);
        if (!queue.pop(&got)) continue;
        CHECK(got.env_id > last[got.line]);
        last[got.line] = got.env_id;
        times_seen[static_cast<std::size_t>(got.env_id)].fetch_add(1);
        if (num_left.fetch_sub(1) == 1) gate.open();
      }
    });
  }
  threads.clear();
  CHECK(owned.get().is_empty());
  for (const auto& times : times_seen) CHECK(times.load() == 1);
}

/// A consumer that is told "empty" goes to sleep, so the answer must hold even while another one pops.
void is_empty_does_not_lie() {
  OwnedQueue owned(8);
  std::atomic<bool> is_over{false};
  TaskQueue queue = owned.get();
  for (std::int32_t i = 0; i < 4; ++i) queue.push(task(i));
  // A single thread pops and pushes, so at least three tasks are there at any time.
  std::jthread other([&, queue]() mutable {
    Task got{};
    for (int i = 0; i < 3'000'000 / kSlowdown; ++i) CHECK(queue.pop(&got) && queue.push(got));
    is_over.store(true);
  });
  while (!is_over.load()) CHECK(!queue.is_empty());
}

}  // namespace

std::vector<Test> task_queue_tests() {
  return {
      {"task queue: first in first out", first_in_first_out},
      {"task queue: refuses when full", refuses_when_full},
      {"task queue: goes round many times", goes_round_many_times},
      {"task queue: clear forgets", clear_forgets},
      {"task queue: many producers and consumers", many_producers_and_consumers},
      {"task queue: is_empty does not lie", is_empty_does_not_lie},
  };
}

}  // namespace envfleet::test
