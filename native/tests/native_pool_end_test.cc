// NativePool: every wait ends, and so does the pool: stuck envs, drain, close, fork.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "engine/native_pool.h"
#include "tests/check.h"
#include "tests/scripted_env.h"
#include "tests/shared_memory.h"

namespace envfleet::test {
namespace {

using std::chrono::milliseconds;
using Rows = std::vector<Seen>;

/// A pool of two threads whose helper is stuck in a step of one of two envs.
class StuckPool : public ScriptedPool<false> {
 public:
  explicit StuckPool(std::uint32_t batch_size = 0)
      : ScriptedPool({.num_envs = 2, .batch_size = batch_size, .num_threads = 2}) {
    reset();
    for (const std::int32_t i : {0, 1}) set_action(i, {Command::kBlockHelper, 5});
    send_all(Op::kStep);
    // The caller steps the other env, which returns when the helper is stuck.
    CHECK(pool->recv(0, in(milliseconds(1))) == Waited::kTimedOut);
    CHECK(model->num_blocked == 1);
  }
};

void a_stuck_env_cannot_hold_recv() {
  StuckPool pool;
  CHECK(pool.pool->recv(0, in(milliseconds(5))) == Waited::kTimedOut);
  const auto runs = pool.pool->runs_under_way();
  CHECK(runs.size() == 1 && runs[0].first == runs[0].second);
  pool.model->release();
  CHECK_WOKEN(pool.pool->recv(0, patience()) == Waited::kReady);
  for (const Seen& seen : pool.receive()) CHECK(seen.reward == 5 && seen.flags == kComplete);
  CHECK(pool.pool->runs_under_way().empty());
  CHECK(pool.pool->recv(0, in(milliseconds(1))) == Waited::kTimedOut);  // nothing is in flight
  CHECK(pool.step({{Command::kGo, 6}})[1].now.num_steps() == 2);
}

void drain() {
  for (const std::uint32_t num_threads : {1, 2, 4}) {
    ScriptedPool<false> pool({.num_envs = 10, .batch_size = 3, .num_threads = num_threads});
    pool.reset();
    CHECK(pool.pool->drain(patience()));  // nothing
    for (std::int32_t k = 0; k < 100; ++k) {
      const std::uint8_t line = k % 2;
      for (std::int32_t i = 0; i < 10; ++i) pool.set_action(i, {k % 7 == 0 ? Command::kSleep : Command::kGo, k});
      if (k % 3 == 0) {
        pool.send({9, 1, 5, 6}, line);  // less than a batch of all
      } else {
        pool.send_all(Op::kStep, line);
      }
      if (line == 1 && k % 5 == 0) pool.receive(1);
      CHECK(pool.pool->drain(patience()));
      CHECK(pool.pool->store(0)->num_leased() == 0 && pool.pool->store(1)->num_leased() == 0);
    }
    const Rows rows = pool.step({{Command::kGo, 7}});
    for (std::int32_t i = 0; i < 10; ++i) {
      CHECK(rows[static_cast<std::size_t>(i)].now.num_steps() == (i == 1 || i == 5 || i == 6 || i == 9 ? 101 : 67));
    }
  }
}

void drain_with_a_stuck_env() {
  StuckPool pool(1);
  CHECK(!pool.pool->drain(in(milliseconds(5))));
  pool.model->release();
  CHECK_WOKEN(pool.pool->drain(patience()));
  CHECK(pool.pool->store(0)->num_leased() == 0);
  CHECK(pool.step({{Command::kGo, 6}})[0].now.num_steps() == 2);
}

// -- the end of a pool --

void close_while_helpers_sleep() {
  ScriptedPool<false> pool({.num_envs = 4, .num_threads = 4});
  pool.reset();
  pool.step({{Command::kGo}});
  CHECK(pool.pool->num_helpers() == 3);
  usleep(5000);  // longer than they spin
  CHECK_WOKEN(pool.pool->close(patience()));
  CHECK(pool.pool->close(patience()));
  CHECK(pool.step({{Command::kGo, 3}})[3].reward == 3);  // the caller does it alone
}

void close_while_helpers_work() {
  for (int i = 0; i < 50; ++i) {
    ScriptedPool<false> pool({.num_envs = 8, .batch_size = 2, .num_threads = 3});
    pool.reset();
    for (std::int32_t env_id = 0; env_id < 8; ++env_id) pool.set_action(env_id, {Command::kSleep, 4});
    pool.send_all(Op::kStep, 1);
    usleep(static_cast<useconds_t>(i) * 10);
    CHECK_WOKEN(pool.pool->close(patience()));
    for (int batch = 0; batch < 4; ++batch) CHECK(pool.receive(1)[0].reward == 4);  // nothing was lost
  }
}

void close_before_there_are_helpers() {
  ScriptedPool<false> alone({.num_envs = 2, .num_threads = 1});
  CHECK(alone.pool->close(in(milliseconds(0))));
  ScriptedPool<false> uncalled({.num_envs = 2, .num_threads = 2, .help_worth = std::chrono::hours(1)});
  uncalled.reset();
  CHECK(uncalled.pool->num_helpers() == 0 && uncalled.pool->close(in(milliseconds(0))));
}

void close_with_a_stuck_env() {
  StuckPool pool;
  CHECK(!pool.pool->close(in(milliseconds(5))));
  CHECK(!pool.pool->close(in(milliseconds(5))));
  const std::weak_ptr<NativePool> remains = pool.pool;
  pool.pool.reset();
  CHECK(!remains.expired());  // the helper keeps what it works on
  pool.model->release();
  CHECK(wait_until([&] { return remains.expired(); }));
}

/// A signal that does not concern the pool is no reason to give up.
void close_in_spite_of_signals() {
  struct sigaction quiet{};
  struct sigaction before{};
  quiet.sa_handler = [](int) {};
  sigaction(SIGUSR1, &quiet, &before);
  {
    StuckPool pool;
    std::atomic<bool> is_closed{false};
    std::thread disturber([&, caller = pthread_self()] {
      for (int i = 0; !is_closed; ++i) {
        pthread_kill(caller, SIGUSR1);
        usleep(500);
        if (i == 20) pool.model->release();
      }
    });
    CHECK(pool.pool->close(patience()));
    is_closed = true;
    disturber.join();
  }
  sigaction(SIGUSR1, &before, nullptr);
}

void a_pool_without_helpers_dies_with_its_owner() {
  ScriptedPool<false> pool({.num_envs = 2, .num_threads = 1});
  pool.reset();
  const std::weak_ptr<NativePool> remains = pool.pool;
  pool.pool.reset();
  CHECK(remains.expired());
}

void a_pool_with_helpers_lives_until_it_is_closed() {
  ScriptedPool<false> pool({.num_envs = 2, .num_threads = 2});
  pool.reset();
  const std::weak_ptr<NativePool> remains = pool.pool;
  pool.pool.reset();
  const std::shared_ptr<NativePool> found = remains.lock();
  CHECK(found != nullptr);
  if (found != nullptr) CHECK_WOKEN(found->close(patience()));
}

// -- fork --

void a_forked_process_steps_alone() {
  ScriptedPool<false> pool({.num_envs = 6, .batch_size = 2, .num_threads = 3});
  pool.reset();
  pool.step({{Command::kGo, 1}});
  Process child([&] {
    for (std::int32_t k = 2; k < 50; ++k) {
      for (const Seen& seen : pool.step({{Command::kGo, k}})) CHECK(seen.reward == k && seen.now.num_steps() == k);
    }
    pool.send_all(Op::kStep, 1);
    CHECK(pool.receive(1).size() == 2);
    CHECK(pool.pool->drain(patience()));
    CHECK_WOKEN(pool.pool->close(patience()));
    CHECK(pool.pool->close(patience()));
    CHECK(pool.step({{Command::kGo, 3}})[5].reward == 3);
  });
  for (std::int32_t k = 2; k < 100; ++k) {
    for (const Seen& seen : pool.step({{Command::kGo, k}})) CHECK(seen.reward == k && seen.now.num_steps() == k);
  }
  CHECK(child.wait(patience()) == 0);
}

void a_forked_process_does_not_wait_for_lost_results() {
  StuckPool pool(1);
  Process child([&] {
    bool is_told = false;
    try {
      pool.pool->recv(0, patience());
    } catch (const std::runtime_error&) {
      is_told = true;
    }
    CHECK(is_told);
    CHECK_WOKEN(!pool.pool->drain(patience()));
    CHECK_WOKEN(pool.pool->close(patience()));
  });
  CHECK(child.wait(patience()) == 0);
  pool.model->release();
  CHECK(pool.receive()[1].reward == 5);
}

/// In a forked process the helpers' handles may mean threads that were started there.
void a_forked_process_keeps_its_own_threads() {
#if defined(__SANITIZE_THREAD__)
  skip("the thread sanitizer allows no threads in a process that was forked by one with threads");
#else
  ScriptedPool<false> pool({.num_envs = 6, .num_threads = 4});
  pool.reset();
  Process child([&] {
    std::atomic<bool> is_over{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i) threads.emplace_back([&] { wait_until([&] { return is_over.load(); }); });
    CHECK(pool.pool->close(patience()));
    is_over = true;
    for (std::thread& thread : threads) {
      try {
        thread.join();
      } catch (const std::system_error&) {
        CHECK(!"close() has detached a thread that is not its own");
        new std::thread(std::move(thread));  // it can be neither joined nor destroyed
      }
    }
  });
  CHECK(child.wait(patience()) == 0);
#endif
}

}  // namespace

std::vector<Test> native_pool_end_tests() {
  return {
      {"native pool: a stuck env cannot hold recv", a_stuck_env_cannot_hold_recv},
      {"native pool: drain", drain},
      {"native pool: drain with a stuck env", drain_with_a_stuck_env},
      {"native pool: close while helpers sleep", close_while_helpers_sleep},
      {"native pool: close while helpers work", close_while_helpers_work},
      {"native pool: close before there are helpers", close_before_there_are_helpers},
      {"native pool: close with a stuck env", close_with_a_stuck_env},
      {"native pool: close in spite of signals", close_in_spite_of_signals},
      {"native pool: without helpers it dies with its owner", a_pool_without_helpers_dies_with_its_owner},
      {"native pool: with helpers it lives until it is closed", a_pool_with_helpers_lives_until_it_is_closed},
      {"native pool: a forked process steps alone", a_forked_process_steps_alone},
      {"native pool: a forked process does not wait for lost results", a_forked_process_does_not_wait_for_lost_results},
      {"native pool: a forked process keeps its own threads", a_forked_process_keeps_its_own_threads},
  };
}

}  // namespace envfleet::test
