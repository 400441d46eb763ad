// NumPy's arithmetic on small arrays: the same operations in the same order, so that sums round as NumPy's do.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace envfleet {

/// np.sum of `size` numbers that lie side by side: halves of halves, and eight sums at a time. `term` makes a number of
/// an index.
template <class Term>
auto numpy_sum(std::size_t size, const Term& term, std::size_t first = 0) -> decltype(term(first)) {
  using Float = decltype(term(first));
  constexpr std::size_t kLanes = 8;
  constexpr std::size_t kBlock = 128;
  Float sum = 0;
  std::size_t i = 0;
  if (size > kBlock) {
    const std::size_t half = size / 2 - size / 2 % kLanes;
    return numpy_sum(half, term, first) + numpy_sum(size - half, term, first + half);
  }
  if (size >= kLanes) {
    Float sums[kLanes] = {};
    for (; i + kLanes <= size; i += kLanes) {
      for (std::size_t channel = 0; channel < kLanes; ++channel) sums[channel] += term(first + i + channel);
    }
    sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  }
  for (; i < size; ++i) sum += term(first + i);
  return sum;
}

/// np.sum(np.square(values)).
template <class Float>
Float numpy_sum_of_squares(const Float* values, std::size_t size) {
  return numpy_sum(size, [&](std::size_t i) { return values[i] * values[i]; });
}

/// np.linalg.norm of up to seven numbers.
inline double numpy_norm(const double* values, std::size_t size) {
  double sum = 0.0;
  for (std::size_t i = 0; i < size; ++i) sum += values[i] * values[i];
  return std::sqrt(sum);
}

/// np.clip: NaN stays NaN.
inline double numpy_clip(double value, double low, double high) {
  if (std::isnan(value)) return value;
  return std::min(std::max(value, low), high);
}

}  // namespace envfleet
