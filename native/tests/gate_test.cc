// Gate: nobody sleeps past an opening, whoever waits and wherever the gate lies.
#include "engine/gate.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/shared_memory.h"

namespace envfleet::test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

struct PingPong {
  Gate gates[2];
  std::atomic<int> num_turns{0};

  /// Player 0 takes the even turns, player 1 the odd ones.
  void play(int player, int end, microseconds spin) {
    for (int turn = player; turn < end && num_failed_checks() == 0; turn += 2) {
      const auto is_mine = [&] { return num_turns.load(std::memory_order_acquire) == turn; };
      CHECK_WOKEN(gates[player].wait(is_mine, patience(), spin) == Waited::kReady);
      num_turns.store(turn + 1, std::memory_order_release);
      gates[1 - player].open();
    }
  }
};

void threads_play(int num_turns, microseconds spin) {
  PingPong game;
  std::jthread other([&] { game.play(1, num_turns, spin); });
  game.play(0, num_turns, spin);
}

void no_lost_wake_up() {
  threads_play(50'000 / kSlowdown, microseconds(0));   // asleep nearly always
  threads_play(50'000 / kSlowdown, microseconds(3));   // awake or about to fall asleep
  threads_play(50'000 / kSlowdown, microseconds(50));  // awake nearly always
}

void wakes_all_waiters() {
  constexpr int kWaiters = 4;
  const int num_rounds = 10'000 / kSlowdown;
  Gate started, arrived;
  std::atomic<int> round{0}, num_arrived{0};
  std::vector<std::jthread> waiters;
  for (int i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([&] {
      for (int mine = 1; mine <= num_rounds && num_failed_checks() == 0; ++mine) {
        CHECK_WOKEN(started.wait([&] { return round.load() >= mine; }, patience(), microseconds(0)) == Waited::kReady);
        num_arrived.fetch_add(1);
        arrived.open();
      }
    });
  }
  for (int i = 1; i <= num_rounds && num_failed_checks() == 0; ++i) {
    round.store(i);
    started.open();
    const auto all_are_here = [&] { return num_arrived.load() == i * kWaiters; };
    CHECK_WOKEN(arrived.wait(all_are_here, patience(), microseconds(0)) == Waited::kReady);
  }
}

void keeps_the_deadline() {
  Gate gate;
  const auto started = Clock::now();
  CHECK(gate.wait([] { return false; }, in(milliseconds(30)), microseconds(20)) == Waited::kTimedOut);
  CHECK(Clock::now() - started >= milliseconds(30));
  CHECK(Clock::now() - started < kPatience / 2);
  const Deadline past = Clock::now() - milliseconds(1);
  CHECK(gate.wait([] { return false; }, past, microseconds(20)) == Waited::kTimedOut);
  CHECK(gate.wait([] { return true; }, past, microseconds(20)) == Waited::kReady);
  // The spin ends at the deadline, however long it was to last.
  CHECK_WOKEN(gate.wait([] { return false; }, in(milliseconds(5)), kPatience) == Waited::kTimedOut);
}

void opening_without_reason_wakes_nobody() {
  Gate gate;
  std::atomic<bool> is_over{false};
  std::jthread opener([&] {
    while (!is_over.load()) gate.open();
  });
  CHECK(gate.wait([] { return false; }, in(milliseconds(50)), microseconds(0)) == Waited::kTimedOut);
  is_over.store(true);
}

void ignore_signal(int) {}

void a_signal_interrupts() {
  struct sigaction action{};
  action.sa_handler = ignore_signal;
  action.sa_flags = SA_RESTART;  // as some libraries set it; a futex with a deadline returns all the same
  sigaction(SIGUSR1, &action, nullptr);
  Gate gate;
  std::atomic<bool> is_over{false};
  // More than one signal: one that comes before the futex sleeps interrupts nothing.
  std::jthread sender([&, waiter = pthread_self()] {
    while (!is_over.load()) {
      std::this_thread::sleep_for(milliseconds(2));
      pthread_kill(waiter, SIGUSR1);
    }
  });
  CHECK_WOKEN(gate.wait([] { return false; }, patience(), microseconds(0)) == Waited::kInterrupted);
  is_over.store(true);
}

void works_across_processes() {
  const int num_turns = 100'000 / kSlowdown;
  const Shared<PingPong> game;
  Process other([&] { game->play(1, num_turns, microseconds(5)); });
  game->play(0, num_turns, microseconds(5));
  CHECK(other.wait(patience()) == 0);
}

void a_killed_sleeper_does_no_harm() {
  struct Room {
    Gate gate;
    std::atomic<int> num_waiting{0};
    std::atomic<bool> is_open{false};
  };
  const Shared<Room> room;
  const auto wait = [&] {
    room->num_waiting.fetch_add(1);
    CHECK_WOKEN(room->gate.wait([&] { return room->is_open.load(); }, patience(), microseconds(0)) == Waited::kReady);
  };
  for (int i = 1; i <= 5; ++i) {
    Process sleeper(wait);
    const Deadline deadline = patience();
    while (room->num_waiting.load() < i && Clock::now() < deadline) usleep(100);
    usleep(2000);
    sleeper.kill();
    CHECK(was_killed(sleeper.wait(patience())));
  }
  Process survivor(wait);
  usleep(5000);
  room->is_open.store(true);
  room->gate.open();
  CHECK(survivor.wait(patience()) == 0);
}

void spins_only_if_waits_are_short() {
  Patience patience;
  for (int i = 0; i < 50; ++i) patience.waited(milliseconds(100));
  CHECK(patience.spin() == microseconds(0));
  patience.waited(microseconds(1));  // one quick answer is no habit
  CHECK(patience.spin() == microseconds(0));
  for (int i = 0; i < 50; ++i) patience.waited(microseconds(30));
  CHECK(patience.spin() > microseconds(0));
  patience.waited(milliseconds(100));  // nor is one slow one
  CHECK(patience.spin() > microseconds(0));
}

}  // namespace

std::vector<Test> gate_tests() {
  return {
      {"gate: no lost wake-up", no_lost_wake_up},
      {"gate: wakes all waiters", wakes_all_waiters},
      {"gate: keeps the deadline", keeps_the_deadline},
      {"gate: opening without reason wakes nobody", opening_without_reason_wakes_nobody},
      {"gate: a signal interrupts", a_signal_interrupts},
      {"gate: works across processes", works_across_processes},
      {"gate: a killed sleeper does no harm", a_killed_sleeper_does_no_harm},
      {"patience: spins only if waits are short", spins_only_if_waits_are_short},
  };
}

}  // namespace envfleet::test
