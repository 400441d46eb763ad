// Box2dEnv: what Gymnasium's environments on Box2D have in common. A Task is what tells one from another.
#pragma once

#include <box2d/box2d.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/registry.h"
#include "envs/box2d/bodies.h"
#include "envs/box2d/draws.h"

namespace envfleet {

/// A world and who listens to it. Does not move.
struct Stage {
  std::optional<b2World> world;
  TouchSensor touch;

  /// A new world, always: in one that was used before, the order of things, and so the result, would be another.
  void clear(const b2Vec2& gravity) {
    touch.clear();
    world.emplace(gravity);
    world->SetContactListener(&touch);
  }
};

/// A Task
///  - has a Model, with settings(): all its arguments as numbers; and types Command (an array of numbers: the action)
///  and Shown (an array: what a renderer needs);
///  - max_draws(num_steps): how many random numbers an episode of so many steps takes at most;
///  - command(model, action);
///  - begin(model, stage, draws): makes the world;
///  - step(model, stage, command, draws): its outcome. begin() ends with a step, as Gymnasium's reset() does.
///  - observation(): of the last step;
///  - shown(stage).
template <class Task>
struct Box2dEnv {
  using Model = typename Task::Model;
  using Command = typename Task::Command;

  /// The longest episode whose state can be saved: the longest that Gymnasium has registered.
  static constexpr std::size_t kMaxSteps = 2000;

  explicit Box2dEnv(const Model& shared) : model(&shared) {}

  void reset(Random& random, const Kwargs&) {
    if (stage_ == nullptr) {
      stage_ = std::make_unique<Stage>();
      draws_.reserve(kMaxDraws);
      commands_.reserve(kMaxSteps);
    }
    draws_.clear();
    commands_.clear();
    num_steps_ = 0;
    Draws draws(random, draws_, kMaxDraws);
    task_.begin(*model, *stage_, draws);
  }

  Outcome step(Action action, Random& random) {
    const Command command = Task::command(*model, action);
    if (num_steps_ < kMaxSteps) commands_.push_back(command);
    ++num_steps_;
    Draws draws(random, draws_, kMaxDraws);
    return task_.step(*model, *stage_, command, draws);
  }

  void observe(Obs obs) const {
    const auto& observation = task_.observation();
    std::copy(observation.begin(), observation.end(), obs.leaf<float>());
  }

  // The state is a row of doubles: number of steps (-1: never reset), number of draws, settings, what a renderer needs,
  // draws, actions. envfleet.pool.simulators.box2d reads it, too.
  std::size_t state_bytes() const { return kStateSize * sizeof(double); }

  void save(std::byte* bytes) const {
    std::vector<double> state(kStateSize, 0.0);
    state[0] = stage_ == nullptr ? -1.0 : static_cast<double>(num_steps_);
    if (stage_ != nullptr) {
      state[1] = static_cast<double>(draws_.size());
      const Settings settings = model->settings();
      std::copy(settings.begin(), settings.end(), state.begin() + kSettingsAt);
      const typename Task::Shown shown = task_.shown(*stage_);
      std::copy(shown.begin(), shown.end(), state.begin() + kShownAt);
      std::copy(draws_.begin(), draws_.end(), state.begin() + kDrawsAt);
      auto out = state.begin() + kCommandsAt;
      for (const Command& command : commands_) out = std::copy(command.begin(), command.end(), out);
    }
    std::memcpy(bytes, state.data(), state_bytes());
  }

  /// Plays the episode again from its beginning.
  void load(const std::byte* bytes) {
    std::vector<double> state(kStateSize);
    std::memcpy(state.data(), bytes, state_bytes());
    if (state[0] == -1.0) {
      stage_.reset();
      return;
    }
    require_whole_number(state[0]);
    require_whole_number(state[1]);
    const Settings settings = model->settings();
    if (!std::equal(settings.begin(), settings.end(), state.begin() + kSettingsAt)) {
      throw std::invalid_argument("this is the state of an environment that was made with other arguments");
    }
    if (state[0] > static_cast<double>(kMaxSteps)) {
      throw std::invalid_argument("this state was saved after " + std::to_string(static_cast<std::int64_t>(state[0])) +
                                  " steps of an episode; states of environments on Box2D can be used up to step " +
                                  std::to_string(kMaxSteps));
    }
    if (state[1] > static_cast<double>(kMaxDraws)) throw std::invalid_argument(kBroken);
    if (stage_ == nullptr) stage_ = std::make_unique<Stage>();
    draws_.reserve(kMaxDraws);
    commands_.reserve(kMaxSteps);
    const auto first_draw = state.begin() + kDrawsAt;
    draws_.assign(first_draw, first_draw + static_cast<std::ptrdiff_t>(state[1]));
    commands_.resize(static_cast<std::size_t>(state[0]));
    num_steps_ = commands_.size();
    auto in = state.begin() + kCommandsAt;
    for (Command& command : commands_) {
      for (auto& number : command) number = static_cast<typename Command::value_type>(*in++);
    }
    Draws draws(draws_);
    task_.begin(*model, *stage_, draws);
    for (const Command& command : commands_) task_.step(*model, *stage_, command, draws);
  }

  const Model* model;

 private:
  static constexpr std::size_t kMaxDraws = Task::max_draws(kMaxSteps);
  static constexpr std::size_t kSettingsAt = 2;
  static constexpr std::size_t kShownAt = kSettingsAt + std::tuple_size_v<Settings>;
  static constexpr std::size_t kDrawsAt = kShownAt + std::tuple_size_v<typename Task::Shown>;
  static constexpr std::size_t kCommandsAt = kDrawsAt + kMaxDraws;
  static constexpr std::size_t kStateSize = kCommandsAt + kMaxSteps * std::tuple_size_v<Command>;

  static void require_whole_number(double number) {
    if (!(number >= 0 && number <= 1e9 && number == std::floor(number))) throw std::invalid_argument(kBroken);
  }

  Task task_;
  std::unique_ptr<Stage> stage_;  // null: never reset
  std::vector<double> draws_;     // since the last reset
  std::vector<Command> commands_;
  std::size_t num_steps_ = 0;  // of the episode, also those beyond kMaxSteps
};

}  // namespace envfleet
