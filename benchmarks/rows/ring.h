// Images that cost nothing to make, so that benchmarks/cluster.py measures the wire that carries them.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "engine/registry.h"

struct Ring {
  static constexpr std::size_t kFrameBytes = 84 * 84;
  static constexpr std::size_t kStacked = 4;
  static constexpr std::size_t kFrames = 4096;  // 29 MB: more than the caches hold for long

  struct Model {
    explicit Model(const envfleet::Kwargs& kwargs)
        : stride(kwargs.number("stacked", 1) != 0 ? 1 : kStacked), frames((kFrames + kStacked) * kFrameBytes) {
      std::mt19937_64 random(0);  // nothing can compress it
      for (std::size_t i = 0; i + 8 <= frames.size(); i += 8) {
        const std::uint64_t word = random();
        std::memcpy(&frames[i], &word, 8);
      }
    }
    envfleet::Spec spec() const {
      const std::vector<double> low(kStacked * kFrameBytes, 0), high(kStacked * kFrameBytes, 255);
      return {.observation = envfleet::Space::box<std::uint8_t>({kStacked, 84, 84}, low, high),
              .action = envfleet::Space::discrete(2),
              .infos = {},
              .max_episode_steps = 0};
    }
    std::size_t stride;
    std::vector<std::uint8_t> frames;
  };
  struct State {
    std::size_t place;
  };

  explicit Ring(const Model& shared) : model(&shared) {}

  void reset(envfleet::Random& random, const envfleet::Kwargs&) {
    state.place = static_cast<std::size_t>(random.integers(kFrames));
  }
  envfleet::Outcome step(envfleet::Action, envfleet::Random&) {
    state.place = (state.place + model->stride) % kFrames;
    return {.reward = 0.0, .terminated = false};
  }
  void observe(envfleet::Obs obs) const {
    std::memcpy(&obs.leaf<std::uint8_t>()[0], &model->frames[state.place * kFrameBytes], kStacked * kFrameBytes);
  }

  const Model* model;
  State state{};
};
ENVFLEET_ENV("Ring-v0", Ring);
