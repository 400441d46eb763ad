// A walk along a line with ten numbers in its infos, or none: benchmarks/infos.py measures what carrying them costs.
#include <array>
#include <cstdint>
#include <string>

#include "engine/registry.h"

struct Informed {
  static constexpr std::size_t kNumInfos = 10;

  struct Model {
    explicit Model(const envfleet::Kwargs& kwargs) : is_silent(kwargs.number("silent", 0) != 0) {}
    envfleet::Spec spec() const {
      envfleet::Spec spec{
          .observation = envfleet::Space::box<float>({4}, {-1e9, -1e9, -1e9, -1e9}, {1e9, 1e9, 1e9, 1e9}),
          .action = envfleet::Space::discrete(2),
          .infos = {},
          .max_episode_steps = 200};
      for (std::size_t i = 0; !is_silent && i < kNumInfos; ++i) {
        spec.infos.push_back(envfleet::info_field<double>("number_" + std::to_string(i)));
      }
      return spec;
    }
    bool is_silent;
  };
  struct State {
    double place, speed;
  };

  explicit Informed(const Model& shared) : model(&shared) {}

  void reset(envfleet::Random& random, const envfleet::Kwargs&) { state = {random.random(), 0.0}; }
  envfleet::Outcome step(envfleet::Action action, envfleet::Random&) {
    state.speed = 0.9 * state.speed + (action.discrete() == 0 ? -0.1 : 0.1);
    state.place += state.speed;
    return {.reward = state.place, .terminated = false};
  }
  void observe(envfleet::Obs obs) const {
    auto* leaf = &obs.leaf<float>()[0];
    leaf[0] = static_cast<float>(state.place);
    leaf[1] = static_cast<float>(state.speed);
    leaf[2] = leaf[3] = 1.0F;
  }
  void inform(envfleet::Info info) const {
    if (model->is_silent) return;
    for (std::size_t i = 0; i < kNumInfos; ++i) info.set(i, state.place + static_cast<double>(i));
  }

  const Model* model;
  State state{};
};
ENVFLEET_ENV("Informed-v0", Informed);
