// Arithmetic of Python and NumPy that C++ does not have: environments use it to equal Gymnasium's to the last bit.
#pragma once

#include <cmath>

namespace envfleet {

/// x**2 as NumPy's scalars and math.pow compute it: with libm's pow, which is not always x * x.
///
/// libm is right to 0.55 units in the last place, so it can differ from the rounded product only where the exact
/// square lies within 0.05 units of the middle between two numbers. `error` is what the product lacks (Dekker); if it
/// is less than 0.4 units, as in four cases of five, there is no need to ask libm.
inline double python_square(double x) {
  const double square = x * x;
  const double shifted = 134217729.0 * x;  // 2^27 + 1: splits x into halves whose products are exact
  const double high = shifted - (shifted - x);
  const double low = x - high;
  const double error = ((high * high - square) + 2 * high * low) + low * low;
  if (square > 1e-280 && square < 1e280 && square + 1.25 * error == square) return square;
  // A compiler that knows the exponent would turn the call into x * x, hence volatile.
  static const volatile double two = 2.0;
  return std::pow(x, two);
}
inline float python_square(float x) {
  static const volatile float two = 2.0f;
  return std::pow(x, two);
}

/// x % divisor, for a positive divisor: never negative.
inline double python_modulo(double x, double divisor) {
  const double rest = std::fmod(x, divisor);
  return rest < 0.0 ? rest + divisor : rest;
}

}  // namespace envfleet
