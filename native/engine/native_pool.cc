#include "engine/native_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace envfleet {
namespace {

constexpr std::uint32_t kCaller = 0;                      // as a writer of rows; helper k is writer k + 1
constexpr std::chrono::nanoseconds kRun{10'000};          // a run of envs takes about this long
constexpr std::chrono::nanoseconds kRunAlone{1'000'000};  // without helpers: deadlines and signals are seen in between
constexpr std::size_t kFirstRun = 4;                      // while nothing is known about the cost
constexpr std::size_t kLongestRun = std::numeric_limits<std::uint16_t>::max();
constexpr double kLongestSpinNs = 200'000;
constexpr std::chrono::milliseconds kLongestBetweenTries{500};
constexpr std::chrono::milliseconds kDrainSlice{1};
constexpr std::chrono::seconds kHelperSlice{60};  // a helper looks around this often, for want of a deadline

std::vector<Field> action_fields(const std::vector<std::size_t>& row_bytes, std::size_t num_envs) {
  std::vector<Field> fields;
  std::size_t end = 0;
  for (const std::size_t bytes : row_bytes) {
    fields.push_back({end, bytes});
    end += (num_envs * bytes + 63) / 64 * 64;
  }
  return fields;
}

std::size_t bytes_of(const std::vector<Field>& fields, std::size_t num_envs) {
  return fields.empty() ? 64 : fields.back().offset + (num_envs * fields.back().row_bytes + 63) / 64 * 64;
}

}  // namespace

NativePool::NativePool(std::unique_ptr<EnvArray> envs, std::vector<std::shared_ptr<BatchStore>> stores,
                       std::vector<std::size_t> action_row_bytes, NativePoolConfig config)
    : envs_(std::move(envs)),
      stores_(std::move(stores)),
      config_(std::move(config)),
      action_fields_(envfleet::action_fields(action_row_bytes, envs_->num_envs())),
      actions_(bytes_of(action_fields_, envs_->num_envs())),
      context_{&options_, actions_.memory.get(), action_fields_.data()},
      queue_memory_(TaskQueue::bytes(TaskQueue::capacity_for(envs_->num_envs()))),
      queue_(queue_memory_.memory.get(), TaskQueue::capacity_for(envs_->num_envs())),
      owner_pid_(getpid()),
      helpers_(config_.num_threads - 1),
      num_available_(helpers_.size()) {
  const std::uint32_t num_envs = envs_->num_envs();
  for (const auto& store : stores_) {
    line_memory_.emplace_back(BatchLine::bytes(num_envs, store->layout().num_rows));
    lines_.emplace_back(line_memory_.back().memory.get(), num_envs, store.get());
    lines_.back().clear();
  }
  queue_.clear();
}

NativePool::~NativePool() {
  if (was_forked()) {
    // The threads do not exist here, and their handles may mean threads that this process has started since.
    for (Helper& helper : helpers_) new std::thread(std::move(helper.thread));
    return;
  }
  for (Helper& helper : helpers_) {
    if (helper.thread.joinable()) helper.thread.detach();  // close() was not called, or did not wait for this one
  }
}

void NativePool::send(const std::int32_t* env_ids, std::size_t num_envs, Op op, std::uint8_t line) {
  lines_[line].open_for(static_cast<std::uint32_t>(num_envs));
  const double work = work_ns(num_envs, op);
  const std::size_t num_called = num_worth_calling(work);
  const std::size_t longest = run_length(num_envs, op, line, num_called);
  for (std::size_t i = 0; i < num_envs;) {
    const std::int32_t first = env_ids == nullptr ? static_cast<std::int32_t>(i) : env_ids[i];
    std::size_t length = std::min(longest, num_envs - i);
    if (env_ids != nullptr) {
      std::size_t neighbours = 1;
      while (neighbours < length && env_ids[i + neighbours] == first + static_cast<std::int32_t>(neighbours)) {
        ++neighbours;
      }
      length = neighbours;
    }
    push({first, op, line, static_cast<std::uint16_t>(length)});
    i += length;
  }
  if (num_called > 0) {
    call(num_called, work);
  } else {
    num_left_ += num_envs;
  }
}

void NativePool::send_all(const std::vector<Op>& ops, std::uint8_t line) {
  lines_[line].open_for(static_cast<std::uint32_t>(ops.size()));
  for (std::size_t i = 0; i < ops.size(); ++i) push({static_cast<std::int32_t>(i), ops[i], line, 1});
  num_left_ += ops.size();
}

Waited NativePool::recv(std::uint8_t line, Deadline deadline) {
  BatchLine& batches = lines_[line];
  Task task;
  while (!batches.is_full()) {
    if (queue_.pop(&task)) {
      const auto now = work(task);
      if (batches.is_full()) break;
      if (now >= deadline) return Waited::kTimedOut;
      continue;
    }
    num_left_ = 0;
    require_not_forked();
    const auto start = Clock::now();
    const Waited waited = gate_.wait([&] { return batches.is_full(); }, deadline, patience_.spin());
    patience_.waited(Clock::now() - start);
    if (waited != Waited::kReady) return waited;
  }
  if (num_started_ > 0) idle_since_ = Clock::now();
  return Waited::kReady;
}

bool NativePool::drain(Deadline deadline) {
  Task task;
  while (queue_.pop(&task)) {
    if (work(task) >= deadline) return false;
  }
  num_left_ = 0;
  for (BatchLine& batches : lines_) {
    const auto is_done = [&] { return batches.num_complete() == batches.num_in_flight(); };
    // The gate tells of full batches only, so this looks now and then.
    while (gate_.wait(is_done, std::min(deadline, Clock::now() + kDrainSlice), {}) != Waited::kReady) {
      if (Clock::now() >= deadline || was_forked()) return false;
    }
    batches.forget();
  }
  return true;
}

std::vector<std::pair<std::int32_t, std::int32_t>> NativePool::runs_under_way() const {
  std::vector<std::pair<std::int32_t, std::int32_t>> runs;
  for (const Helper& helper : helpers_) {
    const std::uint64_t run = helper.run.load(std::memory_order_relaxed);
    if (run == 0) continue;
    const auto first = static_cast<std::int32_t>(run >> 32);
    runs.emplace_back(first, first + static_cast<std::int32_t>(run & 0xffffffff) - 1);
  }
  return runs;
}

bool NativePool::close(Deadline deadline) {
  is_stopping_.store(true, std::memory_order_seq_cst);
  for (Helper& helper : helpers_) helper.gate.open();
  const auto have_ended = [&] { return num_running_.load(std::memory_order_acquire) == 0; };
  // In a forked process the helpers do not exist, and their handles may mean threads that it has started itself.
  if (was_forked()) return true;
  Waited waited;
  do {
    waited = gate_.wait(have_ended, deadline, {});
  } while (waited == Waited::kInterrupted);
  const bool all_ended = waited == Waited::kReady;
  for (Helper& helper : helpers_) {
    if (!helper.thread.joinable()) continue;
    all_ended ? helper.thread.join() : helper.thread.detach();
  }
  return all_ended;
}

// -- inside --

double NativePool::work_ns(std::size_t num_envs, Op op) const {
  return static_cast<double>(num_envs) * cost_ns_[static_cast<std::size_t>(op)];
}

std::size_t NativePool::num_worth_calling(double work_ns) {
  const auto worth_waking = static_cast<double>(config_.help_worth.count());
  const double worth_giving = worth_waking / 12;
  if (num_available_ == 0 || work_ns < worth_giving) return 0;
  const auto num_useful = static_cast<std::size_t>(
      std::clamp(work_ns / std::max(worth_giving, 1.0), 1.0, static_cast<double>(num_available_)));
  if (work_ns >= worth_waking) return num_useful;
  std::size_t num_awake = 0;
  while (num_awake < num_useful && helpers_[num_awake].is_awake.load(std::memory_order_relaxed)) ++num_awake;
  if (num_awake > 0) {
    between_tries_ = kBetweenTries;
    return num_awake;
  }
  const auto now = Clock::now();
  if (now - last_try_ < between_tries_) return 0;
  last_try_ = now;
  between_tries_ = std::min(2 * between_tries_, kLongestBetweenTries);  // until one of them is found awake
  return 1;
}

std::size_t NativePool::run_length(std::size_t num_envs, Op op, std::uint8_t line, std::size_t num_called) const {
  const std::size_t longest = std::min<std::size_t>(kLongestRun, lines_[line].batch_size());
  const double cost_ns = cost_ns_[static_cast<std::size_t>(op)];
  const std::chrono::nanoseconds aim = num_called > 0 ? kRun : kRunAlone;
  const auto short_enough =
      cost_ns == 0.0 ? kFirstRun : static_cast<std::size_t>(static_cast<double>(aim.count()) / cost_ns);
  const std::size_t share = num_called > 0 ? num_envs / (2 * (num_called + 1)) : num_envs;
  return std::clamp<std::size_t>(std::min(share, short_enough), 1, longest);
}

void NativePool::push(const Task& task) {
  while (!queue_.push(task)) {
    require_not_forked();
    sched_yield();  // a helper that was interrupted inside pop() frees its cell soon
  }
}

void NativePool::call(std::size_t num_called, double work_ns) {
  if (num_started_ == 0) start_helpers();
  // To wait awake for much longer than the work takes would cost more than it brings. Helpers that are called for
  // little work are of use only while they are awake.
  const double spin_ns = std::clamp(4 * work_ns, 2.0 * static_cast<double>(kRun.count()), kLongestSpinNs);
  between_batches_.waited(Clock::now() - idle_since_);
  const bool must_sleep =
      work_ns >= static_cast<double>(config_.help_worth.count()) && between_batches_.spin().count() == 0;
  spin_ns_.store(must_sleep ? 0 : static_cast<std::int64_t>(spin_ns), std::memory_order_relaxed);
  for (std::size_t i = 0; i < std::min(num_called, num_started_); ++i) {
    helpers_[i].num_calls.fetch_add(1, std::memory_order_release);
    helpers_[i].gate.open();
  }
}

/// What was sent without a call for help turns out to take longer than thought: nothing was known yet, or few envs
/// were sent at a time.
void NativePool::call_if_much_is_left(const Task& done) {
  num_left_ -= std::min<std::size_t>(num_left_, done.num_envs);
  const double work = work_ns(num_left_, done.op);
  if (num_available_ == 0 || work < static_cast<double>(config_.help_worth.count()) || num_left_ == 0) return;
  num_left_ = 0;
  call(num_worth_calling(work), work);
}

void NativePool::start_helpers() {
  sigset_t all, before;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program, not for ours
  try {
    for (std::uint32_t helper = 0; helper < helpers_.size(); ++helper) {
      num_running_.fetch_add(1, std::memory_order_relaxed);
      helpers_[helper].thread = std::thread([pool = shared_from_this(), writer = helper + 1] { pool->help(writer); });
      ++num_started_;
    }
  } catch (...) {                                          // system_error or bad_alloc
    num_running_.fetch_sub(1, std::memory_order_relaxed);  // no more threads here: go on with those that started
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  num_available_ = num_started_;
}

void NativePool::help(std::uint32_t writer) {
  pthread_setname_np(pthread_self(), "envfleet-helper");
  if (writer <= config_.helper_cpus.size()) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(config_.helper_cpus[writer - 1], &cpus);
    pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus);  // a CPU that is gone is no reason to stop
  }
  Helper& self = helpers_[writer - 1];
  std::uint32_t num_calls = 0;
  while (wait_for_call(self, num_calls)) {
    num_calls = self.num_calls.load(std::memory_order_acquire);
    Task task;
    while (!is_stopping_.load(std::memory_order_relaxed) && queue_.pop(&task)) {
      self.run.store(static_cast<std::uint64_t>(task.env_id) << 32 | task.num_envs, std::memory_order_relaxed);
      const bool may_be_full = envs_->run(task, context_, lines_[task.line], writer);
      self.run.store(0, std::memory_order_relaxed);
      if (may_be_full) gate_.open();
    }
  }
  num_running_.fetch_sub(1, std::memory_order_release);
  gate_.open();
}

/// False if the pool closes.
bool NativePool::wait_for_call(Helper& helper, std::uint32_t num_calls) {
  const auto is_called = [&] {
    return is_stopping_.load(std::memory_order_relaxed) ||
           helper.num_calls.load(std::memory_order_acquire) != num_calls;
  };
  helper.is_awake.store(true, std::memory_order_relaxed);
  const std::chrono::nanoseconds spin(spin_ns_.load(std::memory_order_relaxed));
  if (!Gate::spin_until(is_called, Clock::now() + spin)) {
    helper.is_awake.store(false, std::memory_order_relaxed);
    while (helper.gate.wait(is_called, Clock::now() + kHelperSlice, {}) != Waited::kReady) {
    }
    helper.is_awake.store(true, std::memory_order_relaxed);
  }
  return !is_stopping_.load(std::memory_order_relaxed);
}

/// Returns the time afterwards.
Clock::time_point NativePool::work(const Task& task) {
  const auto start = Clock::now();
  envs_->run(task, context_, lines_[task.line], kCaller);
  const auto end = Clock::now();
  note_cost(task, end - start);
  if (num_left_ > 0) call_if_much_is_left(task);
  return end;
}

void NativePool::note_cost(const Task& task, std::chrono::nanoseconds total) {
  double& cost_ns = cost_ns_[static_cast<std::size_t>(task.op)];
  const double cost_now_ns = static_cast<double>(total.count()) / task.num_envs;
  if (cost_ns == 0.0) cost_ns = cost_now_ns;
  // One step that was interrupted for a time slice says nothing about the next.
  cost_ns += (std::min(cost_now_ns, 4 * cost_ns) - cost_ns) / 8;
}

bool NativePool::was_forked() const { return getpid() != owner_pid_; }

/// Before a wait for helpers, which a forked process does not have.
void NativePool::require_not_forked() const {
  if (was_forked()) {
    throw std::runtime_error("this pool was at work when its process was forked: its results are lost");
  }
}

}  // namespace envfleet
