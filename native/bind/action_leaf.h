// ActionLeaf: does an array that the caller gave hold actions, and only such as the space has? And where they go.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "bind/python.h"
#include "bind/values.h"
#include "engine/native_pool.h"
#include "engine/space.h"

namespace envfleet {

/// One array of the action.
class ActionLeaf {
 public:
  explicit ActionLeaf(const Space& leaf)
      : dtype_(leaf.dtype),
        numpy_type_(in_numpy(leaf.dtype).type),
        shape_(leaf.shape.begin(), leaf.shape.end()),
        num_elements_(leaf.num_elements()),
        num_values_(leaf.num_values) {}

  Dtype dtype() const { return dtype_; }
  std::size_t num_elements() const { return num_elements_; }

  /// An array of `num_rows` rows, of the right dtype, that can be copied as it lies in memory?
  bool fits(nb::handle object, std::size_t num_rows) const {
    auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
    if (!PyArray_Check(object.ptr()) || PyArray_TYPE(array) != numpy_type_ || !PyArray_ISCARRAY_RO(array)) return false;
    const npy_intp* dims = PyArray_DIMS(array);
    return static_cast<std::size_t>(PyArray_NDIM(array)) == shape_.size() + 1 &&
           static_cast<std::size_t>(dims[0]) == num_rows && std::equal(shape_.begin(), shape_.end(), dims + 1);
  }

  /// Of an array that fits: the first row with a NaN, or with a number that a discrete space does not have.
  std::optional<std::size_t> first_wrong_row(nb::handle object, std::size_t num_rows) const {
    return first_wrong_row(PyArray_DATA(reinterpret_cast<PyArrayObject*>(object.ptr())), num_rows);
  }
  std::optional<std::size_t> first_wrong_row(const void* memory, std::size_t num_rows) const {
    if (!num_values_.empty()) return first_beyond(static_cast<const std::int64_t*>(memory), num_rows);
    if (dtype_ == Dtype::kFloat32) return first_nan(static_cast<const float*>(memory), num_rows);
    if (dtype_ == Dtype::kFloat64) return first_nan(static_cast<const double*>(memory), num_rows);
    return std::nullopt;
  }

 private:
  std::optional<std::size_t> first_beyond(const std::int64_t* values, std::size_t num_rows) const {
    for (std::size_t row = 0; row < num_rows; ++row) {
      for (std::size_t i = 0; i < num_elements_; ++i) {
        // As unsigned numbers: a negative one is greater than any.
        const auto value = static_cast<std::uint64_t>(values[row * num_elements_ + i]);
        if (value >= static_cast<std::uint64_t>(num_values_[i])) return row;
      }
    }
    return std::nullopt;
  }

  template <class Float>
  std::optional<std::size_t> first_nan(const Float* values, std::size_t num_rows) const {
    const Float* end = values + num_rows * num_elements_;
    bool is_any = false;
    for (const Float* value = values; value != end; ++value) is_any |= *value != *value;  // a loop without branches
    if (!is_any) return std::nullopt;
    const Float* found = std::find_if(values, end, [](Float value) { return value != value; });
    return static_cast<std::size_t>(found - values) / num_elements_;
  }

  Dtype dtype_;
  int numpy_type_;
  std::vector<npy_intp> shape_;           // of one row
  std::size_t num_elements_;              // of one row
  std::vector<std::int64_t> num_values_;  // each element is between 0 and this; empty: any number
};

/// Copy rows of a leaf to where the envs read them: to those of `env_ids`, or, where it is null, of all.
inline void write_actions(NativePool& pool, std::size_t leaf, const std::byte* rows, const std::int32_t* env_ids,
                          std::size_t num_rows) {
  const std::size_t row_bytes = pool.action_fields()[leaf].row_bytes;
  std::byte* column = pool.action_column(leaf);
  if (env_ids == nullptr) {
    std::memcpy(column, rows, num_rows * row_bytes);
    return;
  }
  for (std::size_t row = 0; row < num_rows; ++row) {
    std::memcpy(column + static_cast<std::size_t>(env_ids[row]) * row_bytes, rows + row * row_bytes, row_bytes);
  }
}

}  // namespace envfleet
