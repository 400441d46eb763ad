// PluginPool: a pool of any registered env, stepped at random on several threads; its rows as bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/native_pool.h"
#include "engine/registry.h"
#include "tests/check.h"
#include "tests/scripted_env.h"

namespace envfleet::test {

class PluginPool {
 public:
  PluginPool(const AnyModel& model, std::uint32_t num_envs, std::uint32_t num_threads, Autoreset autoreset)
      : spec_(model.spec()), num_envs_(num_envs) {
    std::vector<std::size_t> obs_bytes, info_bytes, action_bytes;
    for (const Space* leaf : spec_.observation.leaves()) obs_bytes.push_back(bytes_of(leaf->dtype, leaf->shape));
    for (const Space* leaf : spec_.action.leaves()) action_bytes.push_back(bytes_of(leaf->dtype, leaf->shape));
    for (const InfoField& field : spec_.infos) info_bytes.push_back(bytes_of(field.dtype, field.shape));
    layout_ = {obs_bytes.size(), info_bytes.size(), autoreset == Autoreset::kSameStep};
    store_ = std::make_shared<BatchStore>(-1, lay_out(num_envs, layout_.row_bytes(obs_bytes, info_bytes)));
    constexpr std::uint32_t kMaxEpisodeSteps = 60 / kSlowdown;  // each env begins some episodes
    auto envs = model.make_envs(num_envs, {autoreset, kMaxEpisodeSteps}, layout_);
    for (std::uint32_t i = 0; i < num_envs; ++i) {
      generators_.push_back(std::make_unique<Splitmix>(100 + i));
      envs->set_generator(i, Random(generators_.back()->bitgen(), true));
    }
    constexpr std::chrono::nanoseconds kAlwaysCallHelpers{0};
    pool_ = std::make_shared<NativePool>(std::move(envs), std::vector{store_}, action_bytes,
                                         NativePoolConfig{num_threads, {}, kAlwaysCallHelpers});
  }
  ~PluginPool() { CHECK_WOKEN(pool_->close(patience())); }

  NativePool& pool() { return *pool_; }

  std::vector<std::byte> reset() {
    pool_->send(nullptr, num_envs_, Op::kReset, 0);
    return receive();
  }

  /// The rows of a step; `step` chooses the actions.
  std::vector<std::byte> step(std::uint64_t step) {
    Splitmix random(step);
    std::size_t i = 0;
    for (const Space* leaf : spec_.action.leaves()) write_actions(*leaf, pool_->action_column(i++), random);
    pool_->send(nullptr, num_envs_, Op::kStep, 0);
    return receive();
  }

  struct Saved {
    std::vector<std::byte> state;
    std::uint32_t num_steps;
    bool has_ended;
    std::uint64_t generator;
  };

  std::vector<Saved> save() {
    std::vector<Saved> all;
    for (std::uint32_t i = 0; i < num_envs_; ++i) {
      Saved saved{std::vector<std::byte>(pool_->envs().state_bytes()), 0, pool_->envs().has_ended(i),
                  generators_[i]->state()};
      pool_->envs().get_state(i, saved.state.data(), &saved.num_steps);
      all.push_back(std::move(saved));
    }
    return all;
  }

  void restore(const std::vector<Saved>& all) {
    for (std::uint32_t i = 0; i < num_envs_; ++i) {
      pool_->envs().set_state(i, all[i].state.data(), all[i].num_steps);
      pool_->envs().set_ended(i, all[i].has_ended);
      generators_[i]->set_state(all[i].generator);
    }
  }

 private:
  static std::size_t bytes_of(Dtype dtype, const Shape& shape) {
    static constexpr std::size_t kBytes[] = {1, 1, 1, 4, 8, 4, 8};  // in the order of Dtype
    std::size_t bytes = kBytes[static_cast<std::size_t>(dtype)];
    for (const std::int64_t dim : shape) bytes *= static_cast<std::size_t>(dim);
    return bytes;
  }

  void write_actions(const Space& leaf, std::byte* column, Splitmix& random) const {
    const std::size_t size = leaf.num_elements();
    if (leaf.kind == Space::Kind::kDiscrete) {
      auto* actions = reinterpret_cast<std::int64_t*>(column);
      const auto num_values = static_cast<std::size_t>(leaf.num_values[0]);
      for (std::size_t i = 0; i < num_envs_; ++i) actions[i] = static_cast<std::int64_t>(random.below(num_values));
      return;
    }
    if (leaf.dtype != Dtype::kFloat32) throw std::invalid_argument("no such actions are known here");
    auto* actions = reinterpret_cast<float*>(column);
    for (std::size_t i = 0; i < num_envs_ * size; ++i) {
      const std::size_t element = leaf.low.size() == 1 ? 0 : i % size;
      const double share = static_cast<double>(random.below(1001)) / 1000.0;
      actions[i] = static_cast<float>(leaf.low[element] + share * (leaf.high[element] - leaf.low[element]));
    }
  }

  bool is_final(std::size_t field) const {
    if (!layout_.has_final || field < layout_.final_obs()) return false;
    return field < layout_.infos() || field >= layout_.final_infos();
  }

  std::vector<std::byte> receive() {
    Waited waited{};
    CHECK_WOKEN((waited = pool_->recv(0, patience())) == Waited::kReady);
    if (waited != Waited::kReady) throw std::runtime_error("no batch");
    const BatchLine::Full full = pool_->take(0);
    if ((full.flags & kFailed) != 0) {
      for (std::uint32_t i = 0; i < num_envs_; ++i) {
        const std::string& what = pool_->envs().failure(i).what;
        if (!what.empty()) throw std::runtime_error("env " + std::to_string(i) + ": " + what);
      }
    }
    std::vector<std::byte> rows;
    const std::vector<Field>& fields = store_->layout().fields;
    std::byte* memory = store_->memory(full.buffer);
    for (std::uint32_t row = 0; row < num_envs_; ++row) {
      const bool has_final = (store_->column<std::uint8_t>(memory, kRowFlags)[row] & kHasFinal) != 0;
      for (std::size_t i = 0; i < fields.size(); ++i) {
        if (i == kRowFlags || (is_final(i) && !has_final)) continue;  // without a final row: of an older batch
        const std::byte* value = memory + fields[i].offset + row * fields[i].row_bytes;
        rows.insert(rows.end(), value, value + fields[i].row_bytes);
      }
    }
    store_->give_back(full.buffer);
    return rows;
  }

  const Spec spec_;
  const std::uint32_t num_envs_;
  RowLayout layout_{};
  std::vector<std::unique_ptr<Splitmix>> generators_;  // outlive the pool
  std::shared_ptr<BatchStore> store_;
  std::shared_ptr<NativePool> pool_;
};

/// Reset, step, save, step on, restore, and step as before; all rows. Closes the pool.
inline std::vector<std::vector<std::byte>> rows_of_plugin(const AnyModel& model, std::uint32_t num_threads,
                                                          Autoreset autoreset) {
  constexpr std::uint32_t kNumEnvs = 6;
  constexpr std::uint64_t kNumSteps = 100 / kSlowdown;
  PluginPool pool(model, kNumEnvs, num_threads, autoreset);
  std::vector<std::vector<std::byte>> rows{pool.reset()};
  for (std::uint64_t step = 0; step < kNumSteps; ++step) rows.push_back(pool.step(step));
  const std::vector<PluginPool::Saved> saved = pool.save();
  for (std::uint64_t step = 0; step < kNumSteps; ++step) rows.push_back(pool.step(kNumSteps + step));
  pool.restore(saved);
  for (std::uint64_t step = 0; step < kNumSteps; ++step) {
    CHECK(pool.step(kNumSteps + step) == rows[1 + kNumSteps + step]);
  }
  CHECK(pool.pool().num_helpers() == num_threads - 1);
  return rows;
}

/// The same rows on one thread and on four, in both modes in which a pool resets its envs.
inline void check_plugin_env(const std::string& name, const Values& values) {
  for (const RegisteredEnv& env : registered_envs()) {
    if (env.name != name) continue;
    const std::shared_ptr<const AnyModel> model = make_model(env, values);
    for (const Autoreset autoreset : {Autoreset::kNextStep, Autoreset::kSameStep}) {
      CHECK(rows_of_plugin(*model, 4, autoreset) == rows_of_plugin(*model, 1, autoreset));
    }
    return;
  }
  throw std::invalid_argument("no env is called " + name);
}

}  // namespace envfleet::test
