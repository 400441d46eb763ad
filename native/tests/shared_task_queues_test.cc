// SharedTaskQueues: a parent and its children, here threads or this thread itself. For killed processes see
// kill_test.cc.
#include "engine/shared_task_queues.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/check.h"
#include "tests/test_pool.h"

namespace envfleet::test {
namespace {

using std::chrono::milliseconds;

/// Children as threads, until the pool's test is over.
class ChildThreads {
 public:
  explicit ChildThreads(TestPool& pool) : pool_(pool) {
    for (std::uint32_t child = 0; child < pool.shape().num_children; ++child) {
      threads_.emplace_back([&pool, child] { pool.serve(pool.child_thread_queues(), child); });
    }
  }
  ~ChildThreads() {
    for (std::uint32_t child = 0; child < pool_.shape().num_children; ++child) pool_.task_queues().post_stop(child);
  }

 private:
  TestPool& pool_;
  std::vector<std::jthread> threads_;
};

void every_env_has_one_child() {
  for (const auto& [num_envs, num_children] : {std::pair{1u, 1u}, {7u, 3u}, {8u, 8u}, {100u, 7u}}) {
    TestPool pool({num_envs, num_children, num_envs});
    CHECK(pool.task_queues().num_lines() == 1);
    CHECK(pool.task_queues().first_env(0) == 0 && pool.task_queues().first_env(num_children) == num_envs);
    for (std::uint32_t child = 0; child < num_children; ++child) {
      CHECK(pool.task_queues().first_env(child) < pool.task_queues().first_env(child + 1));
      for (std::uint32_t env = pool.task_queues().first_env(child); env < pool.task_queues().first_env(child + 1);
           ++env) {
        CHECK(pool.task_queues().child_of(env) == child);
      }
    }
  }
}

void full_batches() {
  TestPool pool({12, 3, 12});
  {
    ChildThreads children(pool);
    for (int i = 0; i < 20'000 / kSlowdown && num_failed_checks() == 0; ++i) {
      pool.send(pool.idle_env_ids(), kFull);
      CHECK_WOKEN(pool.task_queues().wait_full(kFull, patience()) == Waiting::kReady);
      pool.receive(kFull);
    }
  }
  pool.give_back_all();
}

void full_batches_sent_in_parts() {
  TestPool pool({6, 2, 6});
  std::mt19937 random(1);
  {
    ChildThreads children(pool);
    for (int i = 0; i < 10'000 / kSlowdown && num_failed_checks() == 0; ++i) {
      while (!pool.idle_env_ids().empty()) pool.send(random_part(pool.idle_env_ids(), 1, random), kFull);
      CHECK_WOKEN(pool.task_queues().wait_full(kFull, patience()) == Waiting::kReady);
      pool.receive(kFull);
    }
  }
  pool.give_back_all();
}

void run_first_ready(TaskQueuesShape shape, bool parent_may_spin, int num_batches) {
  TestPool pool(shape);
  pool.task_queues().let_parent_spin(parent_may_spin);
  std::mt19937 random(2);
  {
    ChildThreads children(pool);
    for (int i = 0; i < num_batches / kSlowdown && num_failed_checks() == 0; ++i) {
      const auto num_in_flight = pool.task_queues().line(kFirstReady).num_in_flight();
      const std::size_t num_needed = num_in_flight < shape.batch_size ? shape.batch_size - num_in_flight : 0;
      pool.send(random_part(pool.idle_env_ids(), num_needed, random), kFirstReady);
      CHECK_WOKEN(pool.task_queues().wait_full(kFirstReady, patience()) == Waiting::kReady);
      pool.receive(kFirstReady);
    }
    // What was not received can be dropped as soon as no env is busy, and full batches follow.
    const Deadline deadline = patience();
    while (!pool.task_queues().busy_env_ids().empty() && Clock::now() < deadline) std::this_thread::yield();
    CHECK(pool.task_queues().busy_env_ids().empty());
    pool.abandon();
    CHECK(pool.task_queues().line(kFirstReady).num_in_flight() == 0);
    pool.send(pool.idle_env_ids(), kFull);
    CHECK_WOKEN(pool.task_queues().wait_full(kFull, patience()) == Waiting::kReady);
    pool.receive(kFull);
  }
  pool.give_back_all();
}

void first_ready_batches() {
  run_first_ready({10, 3, 3}, true, 30'000);
  run_first_ready({5, 2, 4}, false, 15'000);
  run_first_ready({6, 3, 1}, false, 30'000);
}

void requests_and_replies() {
  TestPool pool({4, 2, 4});
  ChildThreads children(pool);
  for (std::uint32_t i = 1; i <= 500 && num_failed_checks() == 0; ++i) {
    for (std::uint32_t child = 0; child < 2; ++child) pool.task_queues().post_request(child);
    for (std::uint32_t child = 0; child < 2; ++child) {
      CHECK_WOKEN(pool.task_queues().wait_replies(child, i, patience()) == Waiting::kReady);
    }
  }
  CHECK(pool.task_queues().wait_replies(0, 501, in(milliseconds(10))) == Waiting::kTimedOut);
}

void waits_end_in_time() {
  TestPool pool({2, 1, 1});
  CHECK(pool.task_queues().wait_full(kFirstReady, in(milliseconds(10))) == Waiting::kTimedOut);
  pool.send({0, 1}, kFull);
  CHECK(pool.task_queues().wait_full(kFull, in(milliseconds(10))) == Waiting::kTimedOut);
  CHECK((pool.task_queues().busy_env_ids() == std::vector<std::int32_t>{0, 1}));
  SharedTaskQueues child = pool.child_thread_queues();
  child.start_child(0, 123);
  CHECK(pool.task_queues().pid(0) == 123);
  CHECK(pool.task_queues().doing(0).env_id == -1);
  pool.run(child, *child.try_next_task());
  CHECK((pool.task_queues().busy_env_ids() == std::vector<std::int32_t>{1}));
  child.try_next_task();
  CHECK(pool.task_queues().doing(0).env_id == 1 && pool.task_queues().doing(0).op == Op::kStep);
}

void seeds_reach_the_child() {
  TestPool pool({2, 1, 2});
  pool.task_queues().set_seed(0, 7);
  pool.task_queues().set_seed(1, std::nullopt);
  SharedTaskQueues child = pool.child_thread_queues();
  CHECK(child.seed(0) == 7 && child.seed(1) == std::nullopt);
  child.num_failures(1).fetch_add(2);
  pool.task_queues().clear_child(0);
  CHECK(pool.task_queues().num_failures(1).load() == 2);
}

/// Each failure is told once and before its batch is given away, also if one batch has several.
void failures_are_told_first() {
  for (const std::uint8_t line : {kFull, kFirstReady}) {
    TestPool pool({4, 1, 3});
    SharedTaskQueues child = pool.child_thread_queues();
    child.start_child(0, 1);
    for (int round = 0; round < 3; ++round) {
      pool.send({0, 1, 2, 3}, line);
      const auto run_one = [&](std::uint8_t flags) {
        const Task task = *child.try_next_task();
        pool.run(child, task, flags);
        return task.env_id;
      };
      run_one(0);
      const std::int32_t first = run_one(kFailed);
      CHECK(pool.task_queues().wait_full(line, patience()) == Waiting::kNews);  // at once: the batch is not full
      CHECK(pool.task_queues().take_exits().empty());
      CHECK(pool.task_queues().next_failed_env() == first);
      CHECK(pool.task_queues().next_failed_env() == std::nullopt);
      const std::int32_t second = run_one(kFailed);
      run_one(0);
      pool.task_queues().take_exits();  // the news were seen, but the second failure was not asked for
      CHECK(pool.task_queues().wait_full(line, patience()) == Waiting::kNews);
      CHECK(pool.task_queues().next_failed_env() == second);
      CHECK(pool.task_queues().wait_full(line, patience()) == Waiting::kReady);
      pool.receive(line);
      if (line == kFirstReady) pool.abandon();
      CHECK(pool.task_queues().next_failed_env() == std::nullopt);
    }
    pool.give_back_all();
  }
}

void deaths_are_news() {
  TestPool pool({3, 3, 3});
  pool.send({0, 1, 2}, kFull);
  std::jthread reporter([task_queues = pool.reporter_queues()]() mutable {
    std::this_thread::sleep_for(milliseconds(5));
    task_queues.report_exit(2, 9);
    task_queues.report_exit(0, 11);
  });
  std::vector<std::pair<std::uint32_t, int>> exits;
  while (exits.size() < 2 && num_failed_checks() == 0) {
    CHECK_WOKEN(pool.task_queues().wait_full(kFull, patience()) == Waiting::kNews);
    for (const auto& exit : pool.task_queues().take_exits()) exits.push_back(exit);
  }
  std::sort(exits.begin(), exits.end());
  CHECK((exits == std::vector<std::pair<std::uint32_t, int>>{{0, 11}, {2, 9}}));
  reporter.join();
  pool.task_queues().take_exits();
  CHECK(pool.task_queues().wait_full(kFull, in(milliseconds(5))) == Waiting::kTimedOut);
}

/// A child that died with a row in its hands, and the next one too.
void a_lost_row_is_filled_by_the_next_child() {
  TestPool pool({6, 2, 2});
  std::optional<SharedTaskQueues> first = pool.child_thread_queues(), other = pool.child_thread_queues();
  first->start_child(0, 1);
  other->start_child(1, 2);
  pool.send({0, 1, 2, 3, 4, 5}, kFirstReady);
  pool.run(*first, *first->try_next_task());
  CHECK(first->try_next_task()->env_id == 1);
  const Place lost = first->claim(1, kFirstReady);
  pool.run_all(*other);
  for (int death = 0; death < 3; ++death) {
    CHECK((pool.task_queues().recover(0) == std::vector<std::int32_t>{1, 2}));
    first = pool.child_thread_queues();
    first->start_child(0, 3 + death);
    CHECK(first->try_next_task()->env_id == 1);
    if (death == 0) continue;  // it dies before it has taken the row
    const Place again = first->claim(1, kFirstReady);
    CHECK(again.batch == lost.batch && again.row == lost.row && again.buffer == lost.buffer);
  }
  CHECK((pool.task_queues().recover(0) == std::vector<std::int32_t>{1, 2}));
  first = pool.child_thread_queues();
  first->start_child(0, 9);
  pool.run_all(*first);
  for (int i = 0; i < 3; ++i) {
    CHECK(pool.task_queues().wait_full(kFirstReady, patience()) == Waiting::kReady);
    pool.receive(kFirstReady);
  }
  CHECK(pool.task_queues().recover(1).empty());
  pool.give_back_all();
}

/// Threads that leave in the middle of a task, as a killed process does. What the thread sanitizer can see of
/// recover().
void children_leave_and_are_replaced() {
  TestPool pool({9, 3, 4});
  std::vector<std::jthread> threads(3);
  std::atomic<unsigned> seed{0};
  std::atomic<int> num_deaths_left{2000 / kSlowdown};
  const auto start = [&](std::uint32_t child) {
    threads[child] = std::jthread([&, child] {
      std::mt19937 random(seed.fetch_add(1));
      SharedTaskQueues task_queues = pool.child_thread_queues();
      task_queues.start_child(child, 1);
      for (const Deadline deadline = in(5 * kPatience); Clock::now() < deadline;) {
        const std::optional<Task> task = task_queues.try_next_task();
        if (!task) {
          task_queues.wait_for_task(deadline);
          continue;
        }
        if (random() % 8 == 0 && num_deaths_left.fetch_sub(1) > 0) {
          if (random() % 2 == 0) task_queues.claim(task->env_id, task->line);
          return task_queues.report_exit(child, SIGKILL);
        }
        if (!pool.run(task_queues, *task)) return;
      }
    });
  };
  for (std::uint32_t child = 0; child < 3; ++child) start(child);
  int num_deaths = 0;
  std::mt19937 random(3);
  for (int round = 0; (num_deaths_left.load() > 0 || round % 64 != 0) && num_failed_checks() == 0; ++round) {
    const std::uint8_t line = round % 64 < 16 ? kFull : kFirstReady;
    if (line == kFull) {
      pool.send(pool.idle_env_ids(), kFull);
    } else {
      const auto num_in_flight = pool.task_queues().line(line).num_in_flight();
      pool.send(random_part(pool.idle_env_ids(), num_in_flight < 4 ? 4 - num_in_flight : 0, random), line);
    }
    const auto settle_deaths = [&] {
      for (const auto& [child, status] : pool.task_queues().take_exits()) {
        threads[child].join();
        pool.task_queues().recover(child);
        start(child);
        ++num_deaths;
      }
    };
    for (;;) {
      Waiting waiting{};
      CHECK_WOKEN((waiting = pool.task_queues().wait_full(line, patience())) == Waiting::kReady ||
                  waiting == Waiting::kNews);
      if (waiting != Waiting::kNews) break;
      settle_deaths();
    }
    if (num_failed_checks() > 0) break;
    pool.receive(line);
    if (round % 64 == 63) {
      for (const Deadline deadline = patience();
           !pool.task_queues().busy_env_ids().empty() && Clock::now() < deadline;) {
        settle_deaths();
      }
      pool.abandon();
    }
  }
  CHECK(num_deaths >= 2000 / kSlowdown);
  for (std::uint32_t child = 0; child < 3; ++child) pool.task_queues().post_stop(child);
  threads.clear();
  pool.give_back_all();
}

}  // namespace

std::vector<Test> shared_task_queues_tests() {
  return {
      {"task_queues: every env has one child", every_env_has_one_child},
      {"task_queues: full batches", full_batches},
      {"task_queues: full batches sent in parts", full_batches_sent_in_parts},
      {"task_queues: first-ready batches", first_ready_batches},
      {"task_queues: requests and replies", requests_and_replies},
      {"task_queues: waits end in time", waits_end_in_time},
      {"task_queues: seeds reach the child", seeds_reach_the_child},
      {"task_queues: failures are told first", failures_are_told_first},
      {"task_queues: deaths are news", deaths_are_news},
      {"task_queues: a lost row is filled by the next child", a_lost_row_is_filled_by_the_next_child},
      {"task_queues: children leave and are replaced", children_leave_and_are_replaced},
  };
}

}  // namespace envfleet::test
