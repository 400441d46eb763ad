// Random: draws from a NumPy bit generator, number for number what numpy.random.Generator draws from it.
#pragma once

#include <numpy/random/bitgen.h>

#include <cstdint>

// Of NumPy's libnpyrandom. Its own header wants Python.h, which this part of the library does not know.
extern "C" {
std::uint64_t random_bounded_uint64(bitgen_t* generator, std::uint64_t offset, std::uint64_t range, std::uint64_t mask,
                                    bool use_masked);
double random_standard_normal(bitgen_t* generator);
}

namespace envfleet {

class Random {
 public:
  Random() = default;
  Random(bitgen_t* generator, bool is_newly_seeded) : generator_(generator), is_newly_seeded_(is_newly_seeded) {}

  /// Between 0 and 1, without 1: Generator.random().
  double random() { return generator_->next_double(generator_->state); }

  /// Generator.uniform(low, high).
  double uniform(double low, double high) { return low + (high - low) * random(); }

  /// Between 0 and n - 1: Generator.integers(n), and the index that Generator.choice() takes from n values.
  std::int64_t integers(std::int64_t n) {
    return static_cast<std::int64_t>(random_bounded_uint64(generator_, 0, static_cast<std::uint64_t>(n) - 1, 0, false));
  }

  /// In a reset: does it come with a seed?
  bool is_newly_seeded() const { return is_newly_seeded_; }
  void was_used_for_reset() { is_newly_seeded_ = false; }

  /// Generator.standard_normal().
  double normal() { return random_standard_normal(generator_); }

 private:
  bitgen_t* generator_ = nullptr;
  bool is_newly_seeded_ = false;
};

}  // namespace envfleet
