// CHECK and the list of tests: all that these tests need of a framework.
#pragma once

#include <chrono>
#include <vector>

#include "engine/gate.h"

namespace envfleet::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr int kSlowdown = 3;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlowdown = 4;
#else
inline constexpr int kSlowdown = 1;
#endif

struct Test {
  const char* name;
  void (*run)();
};

std::vector<Test> gate_tests();
std::vector<Test> task_queue_tests();
std::vector<Test> batch_store_tests();
std::vector<Test> batch_line_tests();
std::vector<Test> fair_queue_tests();
std::vector<Test> shared_task_queues_tests();
std::vector<Test> imaging_tests();
std::vector<Test> kill_tests();
std::vector<Test> instruction_tests();
std::vector<Test> native_parts_tests();
std::vector<Test> episode_tests();
std::vector<Test> native_pool_tests();
std::vector<Test> native_pool_end_tests();
std::vector<Test> allocation_tests();

/// Does not leave the test: every wait has a deadline, so a test comes to its end. May be called by any thread, and by
/// forked processes, whose failures count as well.
#define CHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::envfleet::test::check_failed(__FILE__, __LINE__, #condition))

void check_failed(const char* file, int line, const char* condition);

/// So far in this test, in all its processes.
int num_failed_checks();

/// The test cannot be run here. Say so, then return from the test.
void skip(const char* reason);

// Every wait has this long. One that ends well, but only after half of it, was not woken: see CHECK_WOKEN.
inline constexpr std::chrono::seconds kPatience{20};

inline Deadline in(std::chrono::nanoseconds time) { return Clock::now() + time; }
inline Deadline patience() { return in(kPatience); }

/// A wait looks at its condition once more when its time is over, so a lost wake-up shows only as a long wait.
#define CHECK_WOKEN(wait)                                                                         \
  do {                                                                                            \
    const ::envfleet::Deadline half_time = ::envfleet::test::in(::envfleet::test::kPatience / 2); \
    CHECK(wait);                                                                                  \
    CHECK(::envfleet::Clock::now() < half_time);                                                  \
  } while (false)

}  // namespace envfleet::test
