// SharedTaskQueues with child processes that are killed at random moments, as a pool's children are by the kernel or by
// people.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <system_error>
#include <vector>

#include "engine/shared_task_queues.h"
#include "tests/check.h"
#include "tests/shared_memory.h"
#include "tests/test_pool.h"

namespace envfleet::test {
namespace {

using std::chrono::microseconds;

struct KillPlan {
  int num_kills;
  microseconds longest_pause;  // between two kills
};

/// A process that forks the children, kills them and reports their deaths. It is their parent, so a pid that it kills
/// can be nobody else's.
class Spawner {
 public:
  Spawner(TestPool& pool, KillPlan plan, unsigned seed) : process_([&, this] { serve(pool, plan, seed); }) {}

  void spawn(std::uint32_t child) const {
    CHECK(write(orders_.ends[1], &child, sizeof(child)) == static_cast<ssize_t>(sizeof(child)));
  }
  bool has_killed_enough() const { return *has_killed_enough_; }
  std::optional<int> close() {
    orders_.close_writer();
    return process_.wait(patience());
  }

 private:
  struct Pipe {
    Pipe() {
      if (pipe2(ends, O_NONBLOCK | O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe2");
    }
    Pipe(const Pipe&) = delete;
    Pipe& operator=(const Pipe&) = delete;
    ~Pipe() {
      ::close(ends[0]);
      close_writer();
    }
    void close_writer() {
      if (ends[1] >= 0) ::close(std::exchange(ends[1], -1));
    }
    int ends[2];
  };

  void serve(TestPool& pool, KillPlan plan, unsigned seed) {
    orders_.close_writer();
    std::mt19937 random(seed);
    SharedTaskQueues task_queues = pool.reporter_queues();
    std::map<std::uint32_t, Process> children;
    Clock::time_point next_kill = Clock::now();
    for (const Deadline deadline = in(5 * kPatience); Clock::now() < deadline;) {
      if (plan.num_kills == 0) *has_killed_enough_ = true;
      pollfd order{orders_.ends[0], POLLIN, 0};
      const timespec pause{0, 100'000};
      ppoll(&order, 1, &pause, nullptr);
      for (std::uint32_t child; order.revents & POLLIN;) {
        if (read(orders_.ends[0], &child, sizeof(child)) != static_cast<ssize_t>(sizeof(child))) break;
        CHECK(!children.contains(child));
        children.emplace(child, Process([&] { pool.serve(pool.child_process_queues(), child); }));
      }
      if (order.revents == POLLHUP) return CHECK(children.empty());
      for (auto each = children.begin(); each != children.end();) {
        const std::optional<int> status = each->second.wait(Clock::now());
        if (status) task_queues.report_exit(each->first, *status);
        each = status ? children.erase(each) : std::next(each);
      }
      if (plan.num_kills > 0 && !children.empty() && Clock::now() >= next_kill) {
        const auto victim = std::next(children.begin(), static_cast<std::ptrdiff_t>(random() % children.size()));
        victim->second.kill();
        task_queues.report_exit(victim->first, victim->second.wait(patience()).value_or(0));
        children.erase(victim);
        --plan.num_kills;
        next_kill = in(microseconds(random() % static_cast<unsigned long>(plan.longest_pause.count())));
      }
    }
    CHECK(!"the spawner was not closed in time");
  }

  Pipe orders_;
  Shared<std::atomic<bool>> has_killed_enough_;
  Process process_;  // last: it uses the rest
};

/// The parent: sends and receives while the spawner kills.
class KilledPool {
 public:
  KilledPool(TaskQueuesShape shape, KillPlan plan, unsigned seed)
      : pool_(shape), spawner_(pool_, plan, seed), random_(seed) {
    for (std::uint32_t child = 0; child < shape.num_children; ++child) spawner_.spawn(child);
  }

  bool goes_on() const { return num_failed_checks() == 0 && !(spawner_.has_killed_enough() && num_quiet_ > 20); }

  void step_all() {
    pool_.send(pool_.idle_env_ids(), kFull);
    receive(kFull);
  }

  void step_some() {
    const auto num_in_flight = pool_.task_queues().line(kFirstReady).num_in_flight();
    const std::uint32_t batch_size = pool_.shape().batch_size;
    const std::size_t num_needed = num_in_flight < batch_size ? batch_size - num_in_flight : 0;
    pool_.send(random_part(pool_.idle_env_ids(), num_needed, random_), kFirstReady);
    receive(kFirstReady);
  }

  void drain() {
    const Deadline deadline = patience();
    while (!pool_.task_queues().busy_env_ids().empty() && Clock::now() < deadline) {
      replace_the_dead();
      usleep(50);
    }
    CHECK(pool_.task_queues().busy_env_ids().empty());
    pool_.abandon();
  }

  /// Also of a child whose death the last batches did not wait for.
  int num_deaths_of(int num_kills) {
    for (const Deadline deadline = patience(); num_deaths_ < num_kills && Clock::now() < deadline;) {
      replace_the_dead();
      usleep(50);
    }
    return num_deaths_;
  }

  /// All children are told to stop, and leave by themselves.
  void close() {
    const std::uint32_t num_children = pool_.shape().num_children;
    for (std::uint32_t child = 0; child < num_children; ++child) pool_.task_queues().post_stop(child);
    for (std::uint32_t num_left = num_children; num_left > 0 && num_failed_checks() == 0;) {
      CHECK_WOKEN(pool_.task_queues().wait_full(kFull, patience()) == Waiting::kNews);
      for (const auto& [child, status] : pool_.task_queues().take_exits()) {
        CHECK(status == 0);
        --num_left;
      }
    }
    CHECK(spawner_.close() == 0);
    pool_.give_back_all();
  }

 private:
  void receive(std::uint8_t line) {
    ++num_quiet_;
    for (;;) {
      Waiting waiting{};
      CHECK_WOKEN((waiting = pool_.task_queues().wait_full(line, patience())) == Waiting::kReady ||
                  waiting == Waiting::kNews);
      if (waiting == Waiting::kReady) pool_.receive(line);
      if (waiting != Waiting::kNews) return;
      replace_the_dead();
    }
  }

  void replace_the_dead() {
    for (const auto& [child, status] : pool_.task_queues().take_exits()) {
      CHECK(was_killed(status));  // a sanitizer's finding, for one, is another end
      for (const std::int32_t env_id : pool_.task_queues().recover(child)) CHECK(pool_.is_in_flight(env_id));
      spawner_.spawn(child);
      ++num_deaths_;
      num_quiet_ = 0;
    }
  }

  TestPool pool_;
  Spawner spawner_;
  std::mt19937 random_;
  int num_deaths_ = 0;
  int num_quiet_ = 0;  // batches since the last death
};

// A new child takes longer to start than a batch takes, so longer pauses let the pool get somewhere between kills.
constexpr microseconds kShortPause{2'000 * kSlowdown};
constexpr microseconds kLongPause{6'000 * kSlowdown};
constexpr int kNumKills = kSlowdown == 1 ? 400 : 200;

void killed_while_all_are_stepped() {
  KilledPool pool({6, 3, 6}, {kNumKills, kShortPause}, 1);
  while (pool.goes_on()) pool.step_all();
  CHECK(pool.num_deaths_of(kNumKills) == kNumKills);
  pool.close();
}

void killed_while_some_are_stepped() {
  for (const auto& [pause, seed] : {std::pair{kShortPause, 2u}, std::pair{kLongPause, 3u}}) {
    KilledPool pool({8, 3, 3}, {kNumKills, pause}, seed);
    while (pool.goes_on()) pool.step_some();
    CHECK(pool.num_deaths_of(kNumKills) == kNumKills);
    pool.drain();
    pool.close();
  }
}

void killed_while_modes_change() {
  KilledPool pool({7, 3, 2}, {kNumKills, kShortPause}, 4);
  for (int round = 0; pool.goes_on(); ++round) {
    if (round % 8 < 2) {
      pool.step_all();
    } else {
      pool.step_some();
      if (round % 8 == 7) pool.drain();
    }
  }
  pool.drain();
  CHECK(pool.num_deaths_of(kNumKills) == kNumKills);
  pool.close();
}

}  // namespace

std::vector<Test> kill_tests() {
  return {
      {"kill: while all are stepped", killed_while_all_are_stepped},
      {"kill: while some are stepped", killed_while_some_are_stepped},
      {"kill: while modes change", killed_while_modes_change},
  };
}

}  // namespace envfleet::test
