// Episode: one native env and the rule for what follows its last step. The twin of envfleet.contract.episode; one
// conformance suite holds both.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "engine/batch_line.h"
#include "engine/env.h"

namespace envfleet {

/// What follows the last step of an episode.
enum class Autoreset : std::uint8_t {
  kNextStep = 0,  // the next step resets: its action is ignored, its reward is 0
  kSameStep = 1,  // the same step resets: its observation is the new episode's first
  kDisabled = 2,  // the caller resets
};

struct EpisodeRules {
  Autoreset autoreset;
  std::uint32_t max_episode_steps;  // 0: no limit
};

/// Never destroyed: a thread may still read it when the program ends.
inline const Kwargs& no_options() {
  static const auto* none = new Kwargs;
  return *none;
}

/// With autoreset disabled, an env was stepped after its episode had ended.
struct StepOnEndedEpisode : std::logic_error {
  StepOnEndedEpisode() : std::logic_error("the episode of this env has ended: reset it before the next step()") {}
};

/// `Slot` is where the results go: its row is taken when the first of obs(), info(), final_obs() and final_info() is
/// called. Everything that may take long is done before that, as far as possible.
template <NativeEnv Env>
struct Episode {
  explicit Episode(const typename Env::Model& model) : env(model) {}

  template <class Slot>
  RowResult reset(const Kwargs& options, Slot& slot) {
    begin(options);
    show(slot);
    return {.reward = 0.0, .terminated = false, .truncated = false};
  }

  template <class Slot>
  RowResult step(Action action, const EpisodeRules& rules, Slot& slot) {
    if (ended) {
      if (rules.autoreset == Autoreset::kNextStep) return reset(no_options(), slot);
      throw StepOnEndedEpisode();
    }
    is_in_reset = false;
    Outcome outcome = env.step(action, random);
    ++num_steps;
    if (rules.max_episode_steps != 0 && num_steps >= rules.max_episode_steps) outcome.truncated = true;
    ended = outcome.terminated || outcome.truncated;
    std::uint8_t flags = 0;
    if (ended && rules.autoreset == Autoreset::kSameStep) {
      env.observe(slot.final_obs());
      if constexpr (Informs<Env>) env.inform(slot.final_info());
      begin(no_options());
      flags = kHasFinal;
    }
    show(slot);
    return {.reward = outcome.reward, .terminated = outcome.terminated, .truncated = outcome.truncated, .flags = flags};
  }

  /// The last observation again, without infos.
  template <class Slot>
  RowResult repeat(Slot& slot) const {
    env.observe(slot.obs());
    return {.reward = 0.0, .terminated = false, .truncated = false};
  }

  Env env;
  Random random;
  std::uint32_t num_steps = 0;
  bool ended = true;
  bool is_in_reset = false;  // what was begun last, if something is thrown

 private:
  void begin(const Kwargs& options) {
    is_in_reset = true;
    env.reset(random, options);
    random.was_used_for_reset();
    num_steps = 0;
    ended = false;
  }

  template <class Slot>
  void show(Slot& slot) const {
    env.observe(slot.obs());
    if constexpr (Informs<Env>) env.inform(slot.info());
  }
};

}  // namespace envfleet
