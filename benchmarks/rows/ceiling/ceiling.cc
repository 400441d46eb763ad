// The ceiling of a native pool: a plain loop over the pool's own CartPole structs, in one thread. No queue, no gate, no
// Python; results go into the same arrays again and again.
//
// Reads the length of a window in seconds from each line of its input, and answers with the env steps done and the
// seconds taken.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "engine/episode.h"
#include "envs/classic_control/cart_pole.h"

namespace {

using envfleet::Action;
using envfleet::CartPole;
using envfleet::Field;
using envfleet::Obs;
using envfleet::Outcome;
using envfleet::Row;
using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMaxEpisodeSteps = 500;
constexpr std::size_t kNumActionBatches = 16;  // as in pool.py

/// Splitmix64: good enough to start an episode, and quicker than anything NumPy has.
std::uint64_t next_uint64(void* state) {
  std::uint64_t z = *static_cast<std::uint64_t*>(state) += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}
std::uint32_t next_uint32(void* state) { return static_cast<std::uint32_t>(next_uint64(state) >> 32); }
double next_double(void* state) { return static_cast<double>(next_uint64(state) >> 11) * 0x1p-53; }

struct Slot {
  explicit Slot(const CartPole::Model& model) : env(model) {}
  CartPole env;
  std::uint32_t num_steps = 0;
  bool ended = true;
};

class Loop {
 public:
  explicit Loop(std::size_t num_envs)
      : slots_(num_envs, Slot(model_)),
        actions_(kNumActionBatches * num_envs),
        obs_(num_envs * 4),
        rewards_(num_envs),
        terminated_(num_envs),
        truncated_(num_envs) {
    for (std::int64_t& action : actions_) action = static_cast<std::int64_t>(next_uint64(&seed_) & 1);
  }

  /// One step of all envs for each batch of actions; returns the number of env steps. As in the pool, the step that
  /// follows an episode's last one resets.
  std::size_t step_all_batches() {
    const std::size_t num_envs = slots_.size();
    for (std::size_t batch = 0; batch < kNumActionBatches; ++batch) {
      auto* actions = reinterpret_cast<std::byte*>(actions_.data() + batch * num_envs);
      for (std::size_t i = 0; i < num_envs; ++i) step(i, Action(Row(actions, &kActionField, i)));
      asm volatile("" ::: "memory");  // the caller of a pool may read every batch
    }
    return kNumActionBatches * num_envs;
  }

 private:
  void step(std::size_t i, Action action) {
    Slot& slot = slots_[i];
    Outcome outcome;
    if (slot.ended) {
      slot.env.reset(random_, envfleet::no_options());
      slot.num_steps = 0;
    } else {
      outcome = slot.env.step(action, random_);
      outcome.truncated = ++slot.num_steps >= kMaxEpisodeSteps;
    }
    slot.ended = outcome.terminated || outcome.truncated;
    slot.env.observe(Obs(reinterpret_cast<std::byte*>(obs_.data()), &kObsField, i));
    rewards_[i] = outcome.reward;
    terminated_[i] = outcome.terminated;
    truncated_[i] = outcome.truncated;
  }

  static constexpr Field kActionField{0, sizeof(std::int64_t)};
  static constexpr Field kObsField{0, 4 * sizeof(float)};

  std::uint64_t seed_ = 0;
  bitgen_t generator_{&seed_, next_uint64, next_uint32, next_double, next_uint64};
  envfleet::Random random_{&generator_, false};
  const CartPole::Model model_{envfleet::no_options()};
  std::vector<Slot> slots_;
  std::vector<std::int64_t> actions_;     // [kNumActionBatches, num_envs]
  std::vector<float> obs_;                // [num_envs, 4]
  std::vector<double> rewards_;           // [num_envs]
  std::vector<std::uint8_t> terminated_;  // [num_envs] 0 or 1
  std::vector<std::uint8_t> truncated_;   // [num_envs] 0 or 1
};

}  // namespace

int main(int argc, char** argv) {
  const long num_envs = argc == 2 ? std::atol(argv[1]) : 0;
  if (num_envs < 1) {
    std::fputs("usage: ceiling NUM_ENVS, then the seconds of a window on each line of input\n", stderr);
    return 2;
  }
  Loop loop(static_cast<std::size_t>(num_envs));
  double window_s = 0.0;
  while (std::scanf("%lf", &window_s) == 1) {
    std::size_t num_steps = 0;
    std::chrono::duration<double> taken{};
    for (const auto start = Clock::now(); taken.count() < window_s; taken = Clock::now() - start) {
      num_steps += loop.step_all_batches();
    }
    std::printf("%zu %.9f\n", num_steps, taken.count());
    std::fflush(stdout);
  }
}
