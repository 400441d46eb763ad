// What the author of a native environment needs: views of one env's rows, and what an environment must offer.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "engine/batch_store.h"
#include "engine/kwargs.h"
#include "engine/random.h"
#include "engine/space.h"

namespace envfleet {

/// What one step brought.
struct Outcome {
  double reward = 0.0;
  bool terminated = false;
  bool truncated = false;  // besides the time limit, which the pool sees to
};

/// One env's row of some arrays that lie in one block of memory.
class Row {
 public:
  Row(std::byte* memory, const Field* fields, std::size_t row) : memory_(memory), fields_(fields), row_(row) {}

  /// The elements of array `i` in this row. T is the dtype that the space declares.
  template <class T>
  T* leaf(std::size_t i = 0) const {
    return reinterpret_cast<T*>(memory_ + fields_[i].offset + row_ * fields_[i].row_bytes);
  }

 private:
  std::byte* memory_;
  const Field* fields_;
  std::size_t row_;
};

/// Where an env writes its observation: straight into its row of the batch.
using Obs = Row;

/// The action of one step.
class Action {
 public:
  explicit Action(Row row) : row_(row) {}

  template <class T>
  const T* leaf(std::size_t i = 0) const {
    return row_.leaf<const T>(i);
  }
  /// The action of a Discrete space.
  std::int64_t discrete() const { return *leaf<std::int64_t>(); }

 private:
  Row row_;
};

/// Where an env writes its info. What it does not set is absent from this row.
class Info {
 public:
  explicit Info(Row row) : row_(row) {}  // a column of values and a column of marks for each field

  template <class T>
  void set(std::size_t field, T value) const {
    *array<T>(field) = value;
  }
  template <class T>
  T* array(std::size_t field) const {
    *row_.leaf<std::uint8_t>(2 * field + 1) = 1;
    return row_.leaf<T>(2 * field);
  }

 private:
  Row row_;
};

/// An env that writes all that changes into `state_bytes()` bytes, and reads it from there.
template <class Env>
concept SavesItself = requires(Env& env, const Env& same_env, std::byte* to, const std::byte* from) {
  { same_env.state_bytes() } -> std::same_as<std::size_t>;  // the same for all envs of a Model
  { same_env.save(to) } -> std::same_as<void>;
  { env.load(from) } -> std::same_as<void>;
};

template <class Env>
concept HasPlainState = requires(Env& env) { requires std::is_trivially_copyable_v<decltype(env.state)>; };

/// A native environment is a struct like this (docs/native_env.md has an example):
///  - Model: what all envs of a pool share, made once from the constructor's keyword arguments. Threads read it at
///    the same time.
///  - state: all that changes, in one trivially copyable struct, so that it can be saved and restored. An env whose
///    state has another form saves itself instead: see SavesItself.
///  - reset, step: may throw; the caller then gets EnvFailed with this env's number.
///  - observe: writes the observation of the present state; may be called again for the same state.
///  - inform (if it has infos): writes the infos of the last reset or step.
template <class Env>
concept NativeEnv = requires(Env& env, const Env& same_env, const typename Env::Model& model, const Kwargs& kwargs,
                             Random& random, Action action, Obs obs) {
  typename Env::Model;
  requires std::constructible_from<typename Env::Model, const Kwargs&>;
  requires std::constructible_from<Env, const typename Env::Model&>;
  { model.spec() } -> std::same_as<Spec>;
  { env.reset(random, kwargs) } -> std::same_as<void>;
  { env.step(action, random) } -> std::same_as<Outcome>;
  { same_env.observe(obs) } -> std::same_as<void>;
  requires SavesItself<Env> || HasPlainState<Env>;
};

template <class Env>
concept Informs = requires(const Env& env, Info info) { env.inform(info); };

}  // namespace envfleet
