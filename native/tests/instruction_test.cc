// SharedTaskQueues with a child that is killed, or falls asleep, at each single instruction of its work on a row.
//
// The child runs with the processor's trap flag set: after every instruction it gets a signal, counts it, and at the
// chosen one is killed or waits.
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <optional>
#include <vector>

#include "engine/shared_task_queues.h"
#include "tests/check.h"
#include "tests/shared_memory.h"
#include "tests/test_pool.h"

namespace envfleet::test {
namespace {

#if defined(__SANITIZE_THREAD__)

void cannot_step() { skip("the thread sanitizer makes 50,000 instructions of a row, and it sees but one process"); }

#elif !defined(__x86_64__)

void cannot_step() { skip("single steps are written for x86-64 only"); }

#else

enum class Fate { kKilled, kAsleep };

struct Trap {
  std::atomic<long> num_instructions{0};
  long last = 0;  // the instruction after which `fate` comes; 0: never
  Fate fate = Fate::kKilled;
  std::atomic<bool> is_asleep{false};
  std::atomic<bool> may_go_on{false};
};

Trap* trap = nullptr;

void after_instruction(int, siginfo_t*, void* context) {
  if (trap->num_instructions.fetch_add(1) + 1 != trap->last) return;
  if (trap->fate == Fate::kKilled) kill(getpid(), SIGKILL);
  const int saved_errno = errno;
  trap->is_asleep.store(true);
  while (!trap->may_go_on.load()) usleep(20);
  errno = saved_errno;
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] &= ~0x100;  // the rest at full speed
}

// The compiler may keep values in the 128 bytes below the stack pointer.
[[gnu::always_inline]] inline void set_trap_flag() {
  asm volatile("lea -128(%%rsp), %%rsp; pushfq; orq $0x100, (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::: "memory", "cc");
}
[[gnu::always_inline]] inline void clear_trap_flag() {
  asm volatile("lea -128(%%rsp), %%rsp; pushfq; andq $~0x100, (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::
                   : "memory", "cc");
}

/// Child 0 as a process: its first task is done step by step, the others at full speed.
class SteppedChild {
 public:
  SteppedChild(TestPool& pool, long last, Fate fate, std::uint8_t flags = 0)
      : process_([&, this] {
          trap = &*trap_;
          trap->last = last;
          trap->fate = fate;
          struct sigaction action{};
          action.sa_sigaction = after_instruction;
          action.sa_flags = SA_SIGINFO;
          sigaction(SIGTRAP, &action, nullptr);
          SharedTaskQueues task_queues = pool.child_process_queues();
          task_queues.start_child(0, getpid());
          const std::optional<Task> task = task_queues.try_next_task();
          CHECK(task.has_value());
          set_trap_flag();
          pool.run(task_queues, *task, flags);
          clear_trap_flag();
          pool.run_all(task_queues);
        }) {}

  /// Until it is killed or has left.
  std::optional<int> wait() { return process_.wait(patience()); }

  /// Until it sleeps, or has left.
  void wait_asleep() {
    const Deadline deadline = patience();
    while (!trap_->is_asleep.load() && !(status_ = process_.wait(Clock::now())) && Clock::now() < deadline) usleep(20);
    CHECK(trap_->is_asleep.load() || status_ == 0);
  }
  void wake_up() {
    trap_->may_go_on.store(true);
    if (!status_) status_ = process_.wait(patience());
    CHECK(status_ == 0);
  }

  long num_instructions() const { return trap_->num_instructions.load(); }

 private:
  Shared<Trap> trap_;
  std::optional<int> status_;
  Process process_;  // last: it uses the trap
};

/// Call `round(last)` for each instruction, or evenly for as many as there is time for: sanitizers have ten times more.
template <class Round>
void for_each_instruction(long num_instructions, Round&& round) {
  constexpr long kMaxSteps = 150'000 / kSlowdown;  // about 15 us each
  const long num_rounds = std::clamp(2 * kMaxSteps / num_instructions, 25L, num_instructions);
  std::printf("%ld of %ld instructions are tried\n", num_rounds, num_instructions);
  for (long i = 1; i <= num_rounds && num_failed_checks() == 0; ++i) round(i * num_instructions / num_rounds);
}

// -- killed --

struct KillScene {
  std::uint8_t line;
  bool others_are_quicker;  // all rows but those of the killed child are complete when it is killed
  bool holds_lost_row;      // the child takes the place of one that died with a row in its hands
};

/// Returns the number of instructions. It is not always the same, so the last ones may not be reached.
long kill_once(TestPool& pool, SharedTaskQueues& other, const KillScene& scene, long last) {
  pool.send({0, 1, 2, 3}, scene.line);
  if (scene.others_are_quicker) pool.run_all(other);
  if (scene.holds_lost_row) {
    SharedTaskQueues dead = pool.child_process_queues();
    dead.start_child(0, 1);
    dead.claim(dead.try_next_task()->env_id, scene.line);
    CHECK((pool.task_queues().recover(0) == std::vector<std::int32_t>{0, 1}));
  }
  SteppedChild child(pool, last, Fate::kKilled);
  const std::optional<int> status = child.wait();
  CHECK(status == 0 || was_killed(status));
  if (was_killed(status)) {
    pool.reporter_queues().report_exit(0, *status);
    CHECK_WOKEN(pool.task_queues().wait_full(scene.line, patience()) == Waiting::kNews);
    CHECK(pool.task_queues().take_exits().size() == 1);
    pool.task_queues().recover(0);
  }
  Process rest([&] {
    usleep(300);  // the parent is asleep by now
    SharedTaskQueues next = pool.child_process_queues();
    next.start_child(0, getpid());
    pool.run_all(next);
    if (!scene.others_are_quicker) pool.run_all(other);
  });
  while (pool.idle_env_ids().size() < 4) {
    CHECK_WOKEN(pool.task_queues().wait_full(scene.line, patience()) == Waiting::kReady);
    if (num_failed_checks() > 0) break;
    pool.receive(scene.line);
  }
  CHECK(rest.wait(patience()) == 0);
  return child.num_instructions();
}

void killed_at_each_instruction(std::uint8_t line) {
  for (const bool others_are_quicker : {false, true}) {
    for (const bool holds_lost_row : {false, true}) {
      if (holds_lost_row && line == kFull) continue;  // there every row has its env, and none can be lost
      const KillScene scene{line, others_are_quicker, holds_lost_row};
      TestPool pool({4, 2, 2});
      SharedTaskQueues other = pool.child_process_queues();
      other.start_child(1, getpid());
      const long num_instructions = kill_once(pool, other, scene, 0);
      for_each_instruction(num_instructions, [&](long last) { kill_once(pool, other, scene, last); });
      pool.give_back_all();
    }
  }
}

void killed_with_a_fixed_row() { killed_at_each_instruction(kFull); }
void killed_with_a_claimed_row() { killed_at_each_instruction(kFirstReady); }

// -- asleep --

/// A writer that sleeps while the line goes on. Children 1 and 2 are run by this thread.
class SleepScene {
 public:
  SleepScene() : other_(pool_.child_process_queues()) { other_.start_child(1, getpid()); }

  /// Env 0 is in the hands of child 0, which sleeps; env 2 has the other row of its batch.
  void begin(long last, std::uint8_t flags = 0) {
    pool_.send({0, 2}, kFirstReady);
    pool_.run_all(other_);
    sleeper_.emplace(pool_, last, Fate::kAsleep, flags);
    sleeper_->wait_asleep();
  }
  long num_instructions() const { return sleeper_->num_instructions(); }
  void wake_up() { sleeper_->wake_up(); }
  TestPool& pool() { return pool_; }

  void expect_full() {
    CHECK(pool_.task_queues().wait_full(kFirstReady, patience()) == Waiting::kReady);
    if (num_failed_checks() == 0) pool_.receive(kFirstReady);
  }

  /// The sleeper's batch is gone. When it wakes up, another one that lacks a row has the same place in the ring.
  void wake_up_one_round_later() {
    for (std::uint32_t i = 1; i < BatchLine::ring_batches(6, 2); ++i) {
      step({2, 3});
      expect_full();
    }
    step({2});
    wake_up();
    CHECK(pool_.task_queues().poll_full(kFirstReady) == std::nullopt);
    step({3});
    expect_full();
  }

 private:
  void step(const std::vector<std::int32_t>& env_ids) {
    pool_.send(env_ids, kFirstReady);
    pool_.run_all(other_);
  }

  TestPool pool_{{6, 3, 2}};
  SharedTaskQueues other_;
  std::optional<SteppedChild> sleeper_;
};

/// `take(scene)` is true if it made the sleeper's batch go away.
template <class Take>
void sleep_at_each_instruction(Take&& take) {
  SleepScene scene;
  scene.begin(0);
  scene.wake_up();
  scene.expect_full();
  int num_taken = 0;
  for_each_instruction(scene.num_instructions(), [&](long last) {
    scene.begin(last);
    if (take(scene)) {
      ++num_taken;
      scene.wake_up_one_round_later();
    } else {
      scene.wake_up();
      scene.expect_full();
    }
  });
  CHECK(num_taken > 0);
  scene.pool().give_back_all();
}

void asleep_while_another_dies() {
  sleep_at_each_instruction([](SleepScene& scene) {
    scene.pool().task_queues().recover(2);
    if (scene.pool().task_queues().poll_full(kFirstReady) != Waiting::kReady) return false;
    scene.pool().receive(kFirstReady);
    return true;
  });
}

void asleep_while_results_are_dropped() {
  sleep_at_each_instruction([](SleepScene& scene) {
    if (!scene.pool().task_queues().busy_env_ids().empty()) return false;
    scene.pool().abandon();
    return true;
  });
}

void asleep_while_a_failure_is_told() {
  SleepScene scene;
  const auto tell = [&] {
    scene.pool().task_queues().take_exits();
    const auto outcome = scene.pool().task_queues().poll_full(kFirstReady);
    CHECK(outcome != Waiting::kReady);
    return outcome == Waiting::kNews && scene.pool().task_queues().next_failed_env() == 0;
  };
  scene.begin(0, kFailed);
  scene.wake_up();
  CHECK(tell());
  scene.expect_full();
  for_each_instruction(scene.num_instructions(), [&](long last) {
    scene.begin(last, kFailed);
    const bool is_told = tell();
    scene.wake_up();
    if (is_told) {
      scene.pool().task_queues().take_exits();
    } else {
      CHECK(tell());
    }
    scene.expect_full();
  });
  scene.pool().give_back_all();
}

#endif

}  // namespace

std::vector<Test> instruction_tests() {
#if defined(__SANITIZE_THREAD__) || !defined(__x86_64__)
  return {{"each instruction", cannot_step}};
#else
  return {
      {"each instruction: killed with a fixed row", killed_with_a_fixed_row},
      {"each instruction: killed with a claimed row", killed_with_a_claimed_row},
      {"each instruction: asleep while another dies", asleep_while_another_dies},
      {"each instruction: asleep while results are dropped", asleep_while_results_are_dropped},
      {"each instruction: asleep while a failure is told", asleep_while_a_failure_is_told},
  };
#endif
}

}  // namespace envfleet::test
