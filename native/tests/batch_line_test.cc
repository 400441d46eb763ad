// BatchLine: every row exactly once, batches in order, whoever writes.
#include "engine/batch_line.h"

#include <fcntl.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/gate.h"
#include "engine/task_queue.h"
#include "tests/check.h"
#include "tests/shared_memory.h"

namespace envfleet::test {
namespace {

/// A line with memory of its own.
struct OwnedLine {
  OwnedLine(std::uint32_t num_envs, std::uint32_t batch_size, int fd = -1)
      : store(fd, test_layout(batch_size)),
        memory(BatchLine::bytes(num_envs, batch_size)),
        line(memory.get(), num_envs, &store) {
    line.clear();
  }

  /// As a writer does it: claim a row, write it, publish it.
  bool write(std::int32_t env_id, std::uint32_t writer, std::int64_t seq, double reward, std::uint8_t flags = 0) {
    return finish(line.claim(env_id, writer), env_id, seq, reward, flags);
  }
  bool finish(const Place& place, std::int32_t env_id, std::int64_t seq, double reward, std::uint8_t flags = 0) {
    store.column<Obs>(store.memory(place.buffer), kObs)[place.row] = {env_id, seq};
    return line.complete(place, {env_id, reward, false, false, flags});
  }

  Obs obs(std::uint32_t buffer, std::uint32_t row) { return store.column<Obs>(store.memory(buffer), kObs)[row]; }
  std::int32_t env_id(std::uint32_t buffer, std::uint32_t row) {
    return store.column<std::int32_t>(store.memory(buffer), kEnvIds)[row];
  }
  double reward(std::uint32_t buffer, std::uint32_t row) {
    return store.column<double>(store.memory(buffer), kRewards)[row];
  }

  BatchStore store;
  SharedMemory memory;
  BatchLine line;
};

/// Threads that write rows for an owner, who checks them. Rewards tell who wrote a row, and as which of its rows.
class Crew {
 public:
  static constexpr double kRewardsPerWriter = 1e9;

  Crew(std::uint32_t num_envs, std::uint32_t batch_size, std::uint32_t num_writers)
      : num_envs_(num_envs),
        batch_size_(batch_size),
        owned_(num_envs, batch_size),
        queue_memory_(TaskQueue::bytes(TaskQueue::capacity_for(num_envs + num_writers))),
        queue_(queue_memory_.get(), TaskQueue::capacity_for(num_envs + num_writers)),
        seqs_(num_envs),
        is_in_flight_(num_envs),
        last_reward_(num_writers) {
    queue_.clear();
    for (std::uint32_t writer = 0; writer < num_writers; ++writer) {
      threads_.emplace_back([this, writer] { work(writer); });
    }
  }
  ~Crew() {
    for (std::size_t i = 0; i < threads_.size(); ++i) queue_.push({-1, Op::kStop, 0});
    tasks_.open();
  }

  /// Send all envs that are idle.
  void send() {
    std::vector<std::int32_t> env_ids;
    for (std::uint32_t env = 0; env < num_envs_; ++env) {
      if (!is_in_flight_[env]) env_ids.push_back(static_cast<std::int32_t>(env));
    }
    owned_.line.open_for(static_cast<std::uint32_t>(env_ids.size()));
    for (const std::int32_t env_id : env_ids) {
      ++seqs_[static_cast<std::size_t>(env_id)];
      is_in_flight_[static_cast<std::size_t>(env_id)] = true;
      for (const Deadline deadline = patience(); !queue_.push({env_id, Op::kStep, 0}) && Clock::now() < deadline;) {
        std::this_thread::yield();  // a writer was interrupted inside pop()
      }
    }
    tasks_.open();
  }

  /// Wait for a batch, check its rows, and hold its buffer while two more come.
  void receive() {
    const auto is_full = [&] { return owned_.line.is_full(); };
    CHECK_WOKEN(results_.wait(is_full, patience(), std::chrono::microseconds(5)) == Waited::kReady);
    if (num_failed_checks() > 0) return;
    const std::uint32_t buffer = owned_.line.take().buffer;
    std::vector<double> rewards;
    for (std::uint32_t row = 0; row < batch_size_; ++row) {
      const auto env = static_cast<std::size_t>(owned_.env_id(buffer, row));
      const Obs obs = owned_.obs(buffer, row);
      CHECK(is_in_flight_[env]);
      CHECK(static_cast<std::size_t>(obs.env_id) == env && obs.seq == seqs_[env]);
      if (owned_.line.row_is_env()) CHECK(env == row);
      is_in_flight_[env] = false;
      rewards.push_back(owned_.reward(buffer, row));
      // What one writer writes comes in the order in which it wrote it, over all batches.
      double& last = last_reward_[static_cast<std::size_t>(rewards.back() / kRewardsPerWriter)];
      CHECK(owned_.line.row_is_env() || rewards.back() > last);
      last = rewards.back();
    }
    held_.emplace_back(buffer, rewards);
    if (held_.size() > 2) give_back_one();
  }

  BatchStore& store() { return owned_.store; }
  void give_back_all() {
    while (!held_.empty()) give_back_one();
  }

 private:
  void work(std::uint32_t writer) {
    double num_written = 0;
    Task task{};
    for (;;) {
      const auto has_work = [&] { return !queue_.is_empty(); };
      if (tasks_.wait(has_work, patience(), std::chrono::microseconds(5)) != Waited::kReady)
        return CHECK(!"no task came");
      if (!queue_.pop(&task)) continue;
      if (task.op == Op::kStop) return;
      const std::int64_t seq = seqs_[static_cast<std::size_t>(task.env_id)];
      if (owned_.write(task.env_id, writer, seq, writer * kRewardsPerWriter + ++num_written)) results_.open();
    }
  }

  void give_back_one() {
    const auto& [buffer, rewards] = held_.front();
    for (std::uint32_t row = 0; row < batch_size_; ++row) CHECK(owned_.reward(buffer, row) == rewards[row]);
    owned_.store.give_back(buffer);
    held_.pop_front();
  }

  std::uint32_t num_envs_, batch_size_;
  OwnedLine owned_;
  SharedMemory queue_memory_;
  TaskQueue queue_;
  Gate tasks_, results_;
  std::vector<std::int64_t> seqs_;   // [num_envs]
  std::vector<bool> is_in_flight_;   // [num_envs]
  std::vector<double> last_reward_;  // [num_writers]
  std::deque<std::pair<std::uint32_t, std::vector<double>>> held_;
  std::vector<std::jthread> threads_;  // last: they end before the rest goes
};

void run_crew(std::uint32_t num_envs, std::uint32_t batch_size, std::uint32_t num_writers, int num_batches) {
  Crew crew(num_envs, batch_size, num_writers);
  for (int i = 0; i < num_batches / kSlowdown && num_failed_checks() == 0; ++i) {
    crew.send();
    crew.receive();
  }
  crew.give_back_all();
}

void fixed_rows() {
  run_crew(8, 8, 3, 40'000);
  run_crew(1, 1, 1, 4'000);
}

void claimed_rows() {
  run_crew(16, 4, 4, 60'000);
  run_crew(7, 3, 3, 60'000);  // batches that no send fills exactly
  run_crew(9, 1, 4, 60'000);
  run_crew(5, 4, 2, 10'000);
}

void batches_fill_in_order() {
  OwnedLine owned(4, 2);
  owned.line.open_for(4);
  CHECK(owned.line.num_in_flight() == 4);
  const Place first = owned.line.claim(3, 0), second = owned.line.claim(1, 1), third = owned.line.claim(0, 0);
  CHECK(first.batch == 0 && second.batch == 0 && third.batch == 1);
  CHECK(!owned.finish(third, 0, 1, 0));
  CHECK(owned.write(2, 1, 1, 0, kHasObjects));  // fills the second batch
  CHECK(!owned.line.is_full());                 // but the first comes first
  CHECK(!owned.finish(second, 1, 1, 0));
  CHECK(owned.finish(first, 3, 1, 0));
  CHECK(owned.line.is_full());
  const BatchLine::Full full = owned.line.take();
  CHECK(full.flags == 0 && owned.env_id(full.buffer, 0) == 3 && owned.env_id(full.buffer, 1) == 1);
  CHECK(owned.line.is_full());
  const BatchLine::Full next = owned.line.take();
  CHECK(next.flags == kHasObjects && owned.env_id(next.buffer, 0) == 0 && owned.env_id(next.buffer, 1) == 2);
  CHECK(!owned.line.is_full() && owned.line.num_in_flight() == 0);
}

void abandon_and_go_on() {
  for (const std::uint32_t batch_size : {6u, 4u, 2u, 1u}) {
    OwnedLine owned(6, batch_size);
    for (int round = 0; round < 50; ++round) {
      const std::uint32_t num_sent = batch_size == 6 ? 6 : 1 + static_cast<std::uint32_t>(round) % 6;
      owned.line.open_for(num_sent);
      for (std::uint32_t env = 0; env < num_sent; ++env) owned.write(static_cast<std::int32_t>(env), 0, round, 0);
      owned.line.abandon();
      CHECK(owned.store.num_leased() == 0 && owned.line.num_in_flight() == 0 && !owned.line.is_full());

      owned.line.open_for(batch_size);
      for (std::uint32_t env = 0; env < batch_size; ++env) {
        CHECK(!owned.line.is_full());
        owned.write(static_cast<std::int32_t>(env), 0, -round, 0);
      }
      CHECK(owned.line.is_full());
      const std::uint32_t buffer = owned.line.take().buffer;
      for (std::uint32_t row = 0; row < batch_size; ++row) CHECK(owned.obs(buffer, row).seq == -round);
      owned.store.give_back(buffer);
    }
  }
}

void the_owner_of_each_open_row_is_known() {
  OwnedLine owned(6, 3);
  owned.line.open_for(6);
  owned.write(0, 7, 1, 0);
  const Place lost = owned.line.claim(1, 9);
  owned.write(2, 7, 1, 0);
  const auto rows_of = [&](std::uint32_t writer) {
    std::map<std::uint64_t, bool> rows;  // by ticket: is it complete?
    owned.line.rows_of(writer, {}, [&](const Place& place, bool is_complete, std::int32_t) {
      rows[place.batch * 3 + place.row] = is_complete;
    });
    return rows;
  };
  CHECK((rows_of(7) == std::map<std::uint64_t, bool>{{0, true}, {2, true}}));
  CHECK((rows_of(9) == std::map<std::uint64_t, bool>{{1, false}}));
  CHECK(rows_of(0).empty());
  const Place last = owned.line.claim(3, 9);  // nobody has claimed after it, and it is known all the same
  CHECK((rows_of(9) == std::map<std::uint64_t, bool>{{1, false}, {3, false}}));
  owned.finish(lost, 1, 1, 0);
  owned.finish(last, 3, 1, 0);
  owned.line.take();
  CHECK((rows_of(9) == std::map<std::uint64_t, bool>{{3, true}}));
}

void after_a_death_every_row_opens_the_gate() {
  OwnedLine owned(3, 3);
  owned.line.open_for(3);
  CHECK(!owned.write(0, 0, 1, 0));
  owned.line.writer_died();
  CHECK(!owned.line.is_full());
  CHECK(owned.write(1, 1, 1, 0));  // for all that it knows, this may have been the last
  CHECK(!owned.line.is_full());
  CHECK(owned.write(2, 2, 1, 0));
  CHECK(owned.line.is_full());
  owned.line.take();
  owned.line.open_for(3);
  CHECK(!owned.write(0, 0, 2, 0));  // later batches are not affected
}

void nothing_is_sent_without_memory() {
  const MemoryFile file(MFD_ALLOW_SEALING);
  OwnedLine owned(4, 2, file.fd());
  std::vector<std::uint32_t> hoard;
  for (int i = 0; i < 4; ++i) hoard.push_back(owned.store.lease());
  fcntl(file.fd(), F_ADD_SEALS, F_SEAL_GROW);
  bool has_thrown = false;
  try {
    owned.line.open_for(2);
  } catch (const std::system_error&) {
    has_thrown = true;
  }
  CHECK(has_thrown && owned.line.num_in_flight() == 0);
  owned.store.give_back(hoard.back());
  owned.line.open_for(2);
  owned.write(0, 0, 1, 0);
  CHECK(owned.write(1, 0, 1, 0) && owned.line.is_full());
}

}  // namespace

std::vector<Test> batch_line_tests() {
  return {
      {"batch line: fixed rows", fixed_rows},
      {"batch line: claimed rows", claimed_rows},
      {"batch line: batches fill in order", batches_fill_in_order},
      {"batch line: abandon and go on", abandon_and_go_on},
      {"batch line: the owner of each open row is known", the_owner_of_each_open_row_is_known},
      {"batch line: after a death every row opens the gate", after_a_death_every_row_opens_the_gate},
      {"batch line: nothing is sent without memory", nothing_is_sent_without_memory},
  };
}

}  // namespace envfleet::test
