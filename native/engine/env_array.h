// EnvArray: the envs of one native pool, all of one type. One virtual call runs a whole run of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/batch_line.h"
#include "engine/episode.h"
#include "engine/task_queue.h"

namespace envfleet {

/// Why a row has the flag kFailed.
struct EnvFailure {
  enum class During : std::uint8_t {
    kStep = 0,
    kAutoreset = 1,  // the reset that is part of a step
    kReset = 2,
    kEnded = 3,  // a step after the episode's end
  };
  During during;
  std::string what;
};

/// What all tasks of a pool need besides the envs.
struct TaskContext {
  const Kwargs* options;       // of the present reset()
  std::byte* actions;          // [num_envs] of each leaf
  const Field* action_fields;  // where the leaves lie in it
};

class EnvArray {
 public:
  virtual ~EnvArray() = default;

  /// Do the task, and publish its rows. True if a batch may be full now. Never throws: a failed env has a row like any
  /// other, with the flag kFailed, and failure() says why.
  virtual bool run(const Task& task, const TaskContext& context, BatchLine& line, std::uint32_t writer) noexcept = 0;

  virtual std::uint32_t num_envs() const = 0;

  // -- the owner's, while no task of the env is under way (set_autoreset: of any env) --

  /// From the next task on.
  virtual void set_autoreset(Autoreset autoreset) = 0;
  virtual void set_generator(std::uint32_t env_id, Random random) = 0;
  /// A new env in place of the present one; it keeps the generator.
  virtual void rebuild(std::uint32_t env_id) = 0;
  /// Reset the env, and write into a row that was received already. Throws what the env throws.
  virtual void reset_into(std::uint32_t env_id, const Kwargs& options, BatchStore& store, std::uint32_t buffer,
                          std::size_t row) = 0;
  virtual const EnvFailure& failure(std::uint32_t env_id) const = 0;
  virtual bool has_ended(std::uint32_t env_id) const = 0;
  virtual void set_ended(std::uint32_t env_id, bool ended) = 0;

  virtual std::size_t state_bytes() const = 0;
  virtual void get_state(std::uint32_t env_id, std::byte* state, std::uint32_t* num_steps) const = 0;
  virtual void set_state(std::uint32_t env_id, const std::byte* state, std::uint32_t num_steps) = 0;
};

/// A row of a batch for one result. Where rows are claimed, it is claimed when something is written to it.
///
/// All pointers are found once: a store to a byte may change anything, as the compiler sees it, and it would look for
/// them again in every row.
template <bool kIsClaimed>
class BatchSlot {
 public:
  BatchSlot(BatchLine& line, const RowLayout& layout, std::int32_t env_id, std::uint32_t writer)
      : line_(line), layout_(layout), env_id_(env_id), writer_(writer) {
    if constexpr (!kIsClaimed) take();
  }
  /// The next row of the same batch.
  void advance() { ++place_.row; }

  Obs obs() { return row(layout_.obs()); }
  Obs final_obs() { return row(layout_.final_obs()); }
  Info info() { return Info(row(layout_.infos())); }
  Info final_info() { return Info(row(layout_.final_infos())); }

  /// No infos, and zeros in their place, as Gymnasium has it: whoever has some sets them.
  void clear_infos() {
    if (layout_.num_infos == 0) return;
    clear(layout_.infos(), 2 * layout_.num_infos);
    if (layout_.has_final) clear(layout_.final_infos(), 2 * layout_.num_infos);
  }
  void clear_obs() { clear(layout_.obs(), layout_.num_obs); }

  void write(const RowResult& result) {
    if constexpr (kIsClaimed) take();
    fixed_.write(place_.row, result);
  }
  std::uint64_t batch() const { return place_.batch; }

 private:
  void take() {
    if (memory_ != nullptr) return;
    place_ = line_.claim(env_id_, writer_);
    memory_ = line_.store().memory(place_.buffer);
    fields_ = line_.store().layout().fields.data();
    fixed_ = line_.fixed_columns(memory_);
    if constexpr (kIsClaimed) clear_infos();
  }
  void clear(std::size_t first_field, std::size_t num_fields) {
    const Row cleared = row(first_field);
    for (std::size_t i = 0; i < num_fields; ++i) {
      std::memset(cleared.leaf<std::byte>(i), 0, fields_[first_field + i].row_bytes);
    }
  }
  Row row(std::size_t first_field) {
    if constexpr (kIsClaimed) take();
    return {memory_, fields_ + first_field, place_.row};
  }

  BatchLine& line_;
  const RowLayout layout_;
  const std::int32_t env_id_;
  const std::uint32_t writer_;
  Place place_{};
  std::byte* memory_ = nullptr;
  const Field* fields_ = nullptr;
  BatchLine::FixedColumns fixed_{};
};

/// A row of a batch that was received already.
struct ReceivedSlot {
  std::byte* memory;
  const Field* fields;
  const RowLayout& layout;
  std::size_t row;

  Obs obs() const { return {memory, fields + layout.obs(), row}; }
  Info info() const { return Info(Row(memory, fields + layout.infos(), row)); }
};

template <NativeEnv Env>
class EnvArrayOf final : public EnvArray {
 public:
  EnvArrayOf(std::shared_ptr<const typename Env::Model> model, std::uint32_t num_envs, EpisodeRules rules,
             RowLayout layout)
      : model_(std::move(model)), rules_(rules), layout_(layout), failures_(num_envs) {
    episodes_.reserve(num_envs);
    for (std::uint32_t i = 0; i < num_envs; ++i) episodes_.emplace_back(*model_);
  }

  std::uint32_t num_envs() const override { return static_cast<std::uint32_t>(episodes_.size()); }

  bool run(const Task& task, const TaskContext& context, BatchLine& line, std::uint32_t writer) noexcept override {
    const auto end = task.env_id + static_cast<std::int32_t>(task.num_envs);
    if (!line.row_is_env()) {
      bool may_be_full = false;
      for (std::int32_t env_id = task.env_id; env_id < end; ++env_id) {
        BatchSlot<true> slot(line, layout_, env_id, writer);
        const std::uint8_t flags = run_one(task.op, env_id, context, slot);
        may_be_full |= line.publish(slot.batch(), 1, flags);
      }
      return may_be_full;
    }
    BatchSlot<false> slot(line, layout_, task.env_id, writer);
    std::uint8_t flags = 0;
    for (std::int32_t env_id = task.env_id; env_id < end; ++env_id) {
      slot.clear_infos();
      flags |= run_one(task.op, env_id, context, slot);
      slot.advance();
    }
    return line.publish(slot.batch(), task.num_envs, flags);
  }

  void set_autoreset(Autoreset autoreset) override { rules_.autoreset = autoreset; }
  void set_generator(std::uint32_t env_id, Random random) override { episodes_[env_id].random = random; }

  void rebuild(std::uint32_t env_id) override {
    Episode<Env> fresh(*model_);
    fresh.random = episodes_[env_id].random;
    std::destroy_at(&episodes_[env_id]);
    std::construct_at(&episodes_[env_id], std::move(fresh));
  }

  void reset_into(std::uint32_t env_id, const Kwargs& options, BatchStore& store, std::uint32_t buffer,
                  std::size_t row) override {
    ReceivedSlot slot{store.memory(buffer), store.layout().fields.data(), layout_, row};
    episodes_[env_id].reset(options, slot);
  }

  const EnvFailure& failure(std::uint32_t env_id) const override { return failures_[env_id]; }
  bool has_ended(std::uint32_t env_id) const override { return episodes_[env_id].ended; }
  void set_ended(std::uint32_t env_id, bool ended) override { episodes_[env_id].ended = ended; }

  std::size_t state_bytes() const override {
    if constexpr (SavesItself<Env>) {
      return episodes_.empty() ? 0 : episodes_[0].env.state_bytes();
    } else {
      return sizeof(Env::state);
    }
  }
  void get_state(std::uint32_t env_id, std::byte* state, std::uint32_t* num_steps) const override {
    const Env& env = episodes_[env_id].env;
    if constexpr (SavesItself<Env>) {
      env.save(state);
    } else {
      std::memcpy(state, &env.state, sizeof(env.state));
    }
    *num_steps = episodes_[env_id].num_steps;
  }
  void set_state(std::uint32_t env_id, const std::byte* state, std::uint32_t num_steps) override {
    Env& env = episodes_[env_id].env;
    if constexpr (SavesItself<Env>) {
      env.load(state);
    } else {
      std::memcpy(&env.state, state, sizeof(env.state));
    }
    episodes_[env_id].num_steps = num_steps;
  }

 private:
  template <class Slot>
  std::uint8_t run_one(Op op, std::int32_t env_id, const TaskContext& context, Slot& slot) noexcept {
    Episode<Env>& episode = episodes_[static_cast<std::size_t>(env_id)];
    RowResult result;
    try {
      if (op == Op::kStep) {
        const Action action(Row(context.actions, context.action_fields, static_cast<std::size_t>(env_id)));
        result = episode.step(action, rules_, slot);
      } else if (op == Op::kReset) {
        result = episode.reset(*context.options, slot);
      } else {
        result = episode.repeat(slot);
      }
    } catch (const StepOnEndedEpisode& error) {
      result = fail(env_id, EnvFailure::During::kEnded, error.what(), slot);
    } catch (const std::exception& error) {
      result = fail(env_id, during(op, episode), error.what(), slot);
    } catch (...) {
      result = fail(env_id, during(op, episode), "an exception that is no std::exception", slot);
    }
    result.env_id = env_id;
    slot.write(result);
    return result.flags;
  }

  static EnvFailure::During during(Op op, const Episode<Env>& episode) {
    if (op != Op::kStep) return EnvFailure::During::kReset;
    return episode.is_in_reset ? EnvFailure::During::kAutoreset : EnvFailure::During::kStep;
  }

  /// The row of an env that failed: truncated, with reward 0 and the observation that the env still shows.
  template <class Slot>
  RowResult fail(std::int32_t env_id, EnvFailure::During during, const char* what, Slot& slot) noexcept {
    Episode<Env>& episode = episodes_[static_cast<std::size_t>(env_id)];
    failures_[static_cast<std::size_t>(env_id)] = {during, what};
    slot.clear_infos();
    try {
      episode.env.observe(slot.obs());
    } catch (...) {
      slot.clear_obs();
    }
    episode.ended = true;
    return {.truncated = during != EnvFailure::During::kEnded, .flags = kFailed};
  }

  std::shared_ptr<const typename Env::Model> model_;
  EpisodeRules rules_;
  RowLayout layout_;
  std::vector<Episode<Env>> episodes_;
  std::vector<EnvFailure> failures_;  // [num_envs] meaningful where a row is flagged
};

}  // namespace envfleet
