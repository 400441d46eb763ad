// No allocation on the path of a step, by any thread: every call of malloc and its kin is counted.
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/check.h"
#include "tests/scripted_env.h"

#if defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define ENVFLEET_COUNTS_ALLOCATIONS 1

namespace {
std::atomic<bool> is_counting{false};
std::atomic<std::uint64_t> num_allocations{0};

void count() {
  if (is_counting.load(std::memory_order_relaxed)) num_allocations.fetch_add(1, std::memory_order_relaxed);
}
}  // namespace

// In place of glibc's; operator new, aligned or not, comes here too.
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t num, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

void* malloc(std::size_t bytes) {
  count();
  return __libc_malloc(bytes);
}
void* calloc(std::size_t num, std::size_t bytes) {
  count();
  return __libc_calloc(num, bytes);
}
void* realloc(void* memory, std::size_t bytes) {
  count();
  return __libc_realloc(memory, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
  count();
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  count();
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  count();
  *memory = __libc_memalign(alignment, bytes);
  return *memory == nullptr ? ENOMEM : 0;
}
}
#endif

namespace envfleet::test {
namespace {

#ifdef ENVFLEET_COUNTS_ALLOCATIONS

constexpr int kNumBatches = 10'000;

void counts_at_all() {
  num_allocations = 0;
  is_counting = true;
  auto* number = new std::vector<int>(3);
  auto* line = new Splitmix(1);
  is_counting = false;
  CHECK(num_allocations == 3);
  delete number;
  delete line;
}

template <bool kInforms>
void no_allocation(const PoolSetup& setup) {
  ScriptedPool<kInforms> pool(setup);
  pool.reset();
  if (setup.num_threads > 1) {  // the helper has worked: it allocates nothing for a start any more
    pool.step({{Command::kMeetHelper}});
    CHECK(pool.model->num_met == 3);
  }
  const std::uint8_t line = setup.batch_size == 0 ? 0 : 1;
  BatchStore& store = *pool.pool->store(line);
  std::vector<std::int32_t> env_ids(setup.batch_size);
  for (std::uint32_t i = 0; i < setup.num_envs; ++i) {
    // Short episodes, so that there are many autoresets.
    pool.set_action(static_cast<std::int32_t>(i), {i % 2 == 0 ? Command::kGo : Command::kTerminate, 1});
  }
  if (line == 1) pool.send_all(Op::kStep, 1);
  bool is_well = true;
  for (int batch = -200; batch < kNumBatches; ++batch) {
    if (batch == 0) {
      num_allocations = 0;
      is_counting = true;
    }
    if (line == 0) pool.send_all(Op::kStep);
    is_well &= pool.pool->recv(line, patience()) == Waited::kReady;
    if (!is_well) break;
    const BatchLine::Full full = pool.pool->take(line);
    if (line == 1) {
      std::memcpy(env_ids.data(), store.column<std::int32_t>(store.memory(full.buffer), kEnvIds),
                  env_ids.size() * sizeof(std::int32_t));
      pool.pool->send(env_ids.data(), env_ids.size(), Op::kStep, 1);
    }
    store.give_back(full.buffer);
  }
  is_counting = false;
  CHECK(is_well);
  CHECK(num_allocations == 0);
  CHECK(pool.pool->drain(patience()));
}

template <bool kInforms>
void no_allocation_in_any_mode(std::uint32_t num_threads) {
  for (const Autoreset autoreset : {Autoreset::kNextStep, Autoreset::kSameStep}) {
    for (const std::uint32_t batch_size : {0, 3}) {
      no_allocation<kInforms>({.num_envs = 8,
                               .batch_size = batch_size,
                               .num_threads = num_threads,
                               .autoreset = autoreset,
                               .max_episode_steps = 7});
    }
  }
}

void one_thread() { no_allocation_in_any_mode<false>(1); }
void one_thread_with_infos() { no_allocation_in_any_mode<true>(1); }
void with_a_helper() { no_allocation_in_any_mode<false>(2); }
void with_a_helper_and_infos() { no_allocation_in_any_mode<true>(2); }

#else

void counts_at_all() { skip("a sanitizer has its own malloc"); }
void one_thread() { skip("a sanitizer has its own malloc"); }
void one_thread_with_infos() { skip("a sanitizer has its own malloc"); }
void with_a_helper() { skip("a sanitizer has its own malloc"); }
void with_a_helper_and_infos() { skip("a sanitizer has its own malloc"); }

#endif

}  // namespace

std::vector<Test> allocation_tests() {
  return {
      {"allocation: is seen", counts_at_all},
      {"allocation: none with one thread", one_thread},
      {"allocation: none with one thread and infos", one_thread_with_infos},
      {"allocation: none with a helper", with_a_helper},
      {"allocation: none with a helper and infos", with_a_helper_and_infos},
  };
}

}  // namespace envfleet::test
