// Space: what observations and actions of a native environment look like; Spec: all that is known of it.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace envfleet {

enum class Dtype : std::uint8_t { kBool, kInt8, kUint8, kInt32, kInt64, kFloat32, kFloat64 };

template <class T>
constexpr Dtype dtype_of() {
  if constexpr (std::same_as<T, bool>) return Dtype::kBool;
  if constexpr (std::same_as<T, std::int8_t>) return Dtype::kInt8;
  if constexpr (std::same_as<T, std::uint8_t>) return Dtype::kUint8;
  if constexpr (std::same_as<T, std::int32_t>) return Dtype::kInt32;
  if constexpr (std::same_as<T, std::int64_t>) return Dtype::kInt64;
  if constexpr (std::same_as<T, float>) return Dtype::kFloat32;
  if constexpr (std::same_as<T, double>) return Dtype::kFloat64;
}

constexpr std::size_t bytes_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool:
    case Dtype::kInt8:
    case Dtype::kUint8:
      return 1;
    case Dtype::kInt32:
    case Dtype::kFloat32:
      return 4;
    case Dtype::kInt64:
    case Dtype::kFloat64:
      return 8;
  }
  return 0;
}

using Shape = std::vector<std::int64_t>;

/// A Gymnasium space. Dict and Tuple have parts; the others are arrays ("leaves").
struct Space {
  enum class Kind : std::uint8_t { kBox, kDiscrete, kMultiDiscrete, kMultiBinary, kDict, kTuple };

  Kind kind = Kind::kBox;
  Dtype dtype = Dtype::kFloat32;
  Shape shape = {};
  std::vector<double> low = {};               // Box: one bound for all elements, or one for each
  std::vector<double> high = {};              // likewise
  std::vector<std::int64_t> num_values = {};  // Discrete: one number; MultiDiscrete: one for each element
  std::vector<std::string> keys = {};         // Dict
  std::vector<Space> parts = {};              // Dict, Tuple

  template <class T>
  static Space box(Shape shape, std::vector<double> low, std::vector<double> high) {
    return {.kind = Kind::kBox,
            .dtype = dtype_of<T>(),
            .shape = std::move(shape),
            .low = std::move(low),
            .high = std::move(high)};
  }
  static Space discrete(std::int64_t num_values) {
    return {.kind = Kind::kDiscrete, .dtype = Dtype::kInt64, .num_values = {num_values}};
  }
  static Space multi_discrete(std::vector<std::int64_t> num_values) {
    const auto size = static_cast<std::int64_t>(num_values.size());
    return {.kind = Kind::kMultiDiscrete, .dtype = Dtype::kInt64, .shape = {size}, .num_values = std::move(num_values)};
  }
  static Space multi_binary(Shape shape) {
    return {.kind = Kind::kMultiBinary, .dtype = Dtype::kInt8, .shape = std::move(shape)};
  }
  /// Keys in alphabetical order, as Gymnasium sorts them.
  static Space dict(std::vector<std::pair<std::string, Space>> items) {
    Space space{.kind = Kind::kDict};
    for (auto& [key, part] : items) {
      space.keys.push_back(key);
      space.parts.push_back(std::move(part));
    }
    return space;
  }
  static Space tuple(std::vector<Space> parts) { return {.kind = Kind::kTuple, .parts = std::move(parts)}; }

  std::size_t num_elements() const {
    std::size_t size = 1;
    for (const std::int64_t dim : shape) size *= static_cast<std::size_t>(dim);
    return size;
  }

  /// The arrays, in order: for a Dict or Tuple those of its parts.
  void append_leaves(std::vector<const Space*>* leaves) const {
    if (kind != Kind::kDict && kind != Kind::kTuple) leaves->push_back(this);
    for (const Space& part : parts) part.append_leaves(leaves);
  }
  std::vector<const Space*> leaves() const {
    std::vector<const Space*> all;
    append_leaves(&all);
    return all;
  }
};

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One entry of the info dictionary. A name may be a path: "episode/l" is info["episode"]["l"].
struct InfoField {
  std::string name;
  Dtype dtype;
  Shape shape;
};

template <class T>
InfoField info_field(std::string name, Shape shape = {}) {
  return {std::move(name), dtype_of<T>(), std::move(shape)};
}

struct Spec {
  Space observation;
  Space action;
  std::vector<InfoField> infos = {};
  std::uint32_t max_episode_steps = 0;  // the default where nobody says otherwise; 0: no limit
  double step_s = 0.0;                  // how much time passes for the env in a step; 0: it knows no time
};

}  // namespace envfleet
