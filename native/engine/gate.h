// Gate: wait for a change that another thread or process makes. Spin briefly, then sleep on a futex.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>

namespace envfleet {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

enum class Waited {
  kReady,
  kTimedOut,
  kInterrupted,  // a signal came: the caller may want to run its handler, then wait again
};

/// An event counter. It holds no condition of its own: the waiter brings one, and whoever may have
/// made it true opens the gate afterwards. Lives in ordinary or in shared memory; a process killed
/// while it waits costs later openers a system call and nothing else.
class Gate {
 public:
  /// Wake all who wait, so that they look at their condition again.
  void open() noexcept {
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (num_sleepers_.load(std::memory_order_seq_cst) != 0) futex(FUTEX_WAKE, INT_MAX, nullptr);
  }

  template <class Condition>
  Waited wait(Condition&& condition, Deadline deadline, std::chrono::nanoseconds spin) {
    if (condition()) return Waited::kReady;
    if (spin_until(condition, std::min(deadline, Clock::now() + spin))) return Waited::kReady;
    for (;;) {
      // The epoch is read before the last look at the condition: whoever makes it true after that
      // look also moves the epoch, and the futex then refuses to sleep.
      const std::uint32_t seen = epoch_.load(std::memory_order_seq_cst);
      if (condition()) return Waited::kReady;
      const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline - Clock::now());
      if (left.count() <= 0) return Waited::kTimedOut;
      const timespec timeout{static_cast<time_t>(left.count() / 1'000'000'000),
                             static_cast<long>(left.count() % 1'000'000'000)};
      num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
      const long woken = futex(FUTEX_WAIT, seen, &timeout);
      const int error = woken == 0 ? 0 : errno;
      num_sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      if (error == EINTR) return condition() ? Waited::kReady : Waited::kInterrupted;
    }
  }

  /// The first half of a wait alone.
  template <class Condition>
  static bool spin_until(Condition& condition, Deadline end) {
    while (Clock::now() < end) {
      for (int i = 0; i < kChecksPerYield; ++i) {
        if (condition()) return true;
        pause();
      }
      // With more waiters than cores the one we wait for may need this core.
      sched_yield();
    }
    return false;
  }

 private:
  static void pause() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  // Not FUTEX_PRIVATE_FLAG: the same gate may be mapped by several processes.
  long futex(int operation, std::uint32_t value, const timespec* timeout) noexcept {
    static_assert(sizeof(epoch_) == sizeof(std::uint32_t) && std::atomic<std::uint32_t>::is_always_lock_free);
    return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&epoch_), operation, value, timeout, nullptr, 0);
  }

  static constexpr int kChecksPerYield = 32;

  std::atomic<std::uint32_t> epoch_{0};
  std::atomic<std::uint32_t> num_sleepers_{0};
};

/// How long one waiter spins before it sleeps: not at all, unless its waits have been short lately. To
/// wake a sleeper costs a system call, and up to 50 us where the core has gone to sleep as well (a virtual
/// machine's). To spin through a long wait costs the core.
class Patience {
 public:
  std::chrono::nanoseconds spin() const { return typical_ < kLongest ? kLongest : std::chrono::nanoseconds(0); }

  void waited(std::chrono::nanoseconds wait) { typical_ += (std::min(wait, 4 * kLongest) - typical_) / 8; }

 private:
  static constexpr std::chrono::nanoseconds kLongest = std::chrono::microseconds(200);
  std::chrono::nanoseconds typical_{0};  // a moving average
};

}  // namespace envfleet
