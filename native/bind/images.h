// Arrays that are images.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "bind/python.h"

namespace envfleet {

using Pair = std::pair<std::uint32_t, std::uint32_t>;  // height and width

/// The bytes of a contiguous array of `num_bytes` uint8; throws TypeError for anything else.
inline std::uint8_t* bytes_of(nb::handle object, std::size_t num_bytes, const char* name, bool is_written) {
  auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
  const bool is_right = PyArray_Check(object.ptr()) && PyArray_TYPE(array) == NPY_UINT8 &&
                        (is_written ? PyArray_ISCARRAY(array) : PyArray_ISCARRAY_RO(array)) &&
                        static_cast<std::size_t>(PyArray_SIZE(array)) == num_bytes;
  if (!is_right) {
    const std::string text =
        std::string(name) + " must be a contiguous array of " + std::to_string(num_bytes) + " uint8";
    throw nb::type_error(text.c_str());
  }
  return static_cast<std::uint8_t*>(PyArray_DATA(array));
}

}  // namespace envfleet
