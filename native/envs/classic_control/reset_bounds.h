// The reset options "low" and "high" that Gymnasium's classic-control environments share.
#pragma once

#include <cmath>
#include <stdexcept>
#include <utility>

#include "engine/kwargs.h"

namespace envfleet {

inline std::pair<double, double> reset_bounds(const Kwargs& options, double default_low, double default_high) {
  const double low = options.number("low", default_low);
  const double high = options.number("high", default_high);
  if (low > high) throw std::invalid_argument("the reset option 'low' must not be greater than 'high'");
  if (!std::isfinite(high - low)) throw std::overflow_error("the range between 'low' and 'high' is too great");
  return {low, high};
}

}  // namespace envfleet
