// AreaResize: makes images smaller, each pixel the mean of the area it stands for. Equal to OpenCV's INTER_AREA,
// but for sizes so near to each other that it leaves out parts of a pixel under a thousandth.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace envfleet {

struct ImageSize {
  std::uint32_t height;
  std::uint32_t width;
};

/// What the new pixels are made of along one axis.
struct AreaAxis {
  AreaAxis(std::uint32_t from, std::uint32_t to);

  std::uint32_t from;
  std::uint32_t to;
  std::uint32_t cell_units;  // the length of a new pixel; an old one has to / gcd(from, to) of these units

  // A new pixel covers old ones from `first`, with these weights in units. Each has as many taps; spare ones weigh 0.
  std::uint32_t num_taps;
  std::vector<std::uint32_t> first;    // [to]
  std::vector<std::uint16_t> weights;  // [to, num_taps]

  // The same as OpenCV has it, in floating point.
  struct FloatTap {
    std::uint32_t source;
    float weight;
  };
  std::vector<FloatTap> float_taps;
  std::vector<std::uint32_t> float_begin;  // [to + 1]: the taps of a new pixel among `float_taps`
};

/// Images of uint8 with interleaved channels, from one size to another that is not larger either way.
///
/// Sums are whole numbers, so most pixels need no care: OpenCV adds floating-point numbers up, which comes to the same
/// after rounding. Only where the mean lies (nearly) half-way between two values its own rounding errors decide; those
/// few pixels are computed again, in its order of operations.
///
/// `Sum` holds a sum over an axis: with 16 bits it is faster, and images have at most 257 pixels along each.
template <class Sum>
class AreaResize {
 public:
  static constexpr std::uint32_t kLargest = std::min<std::uint32_t>(std::numeric_limits<Sum>::max() / 255, 65535);

  AreaResize(ImageSize from, ImageSize to, std::uint32_t num_channels);

  /// Compute the new rows that the old ones in [0, height) with a nonzero flag are part of. The others stay.
  /// `row_changed` is null: compute all.
  void run(const std::uint8_t* image, const std::uint8_t* row_changed, std::uint8_t* resized);

 private:
  using Units = std::conditional_t<sizeof(Sum) == 2, std::int32_t, std::int64_t>;  // of a new pixel
  enum class Rule { kCopy, kHalf, kWhole, kGeneral };

  bool is_changed(const std::uint8_t* row_changed, std::uint32_t y) const;
  void sum_rows(const std::uint8_t* image, std::uint32_t y);
  template <std::uint32_t kNumChannels, std::uint32_t kNumTaps>
  void mean_columns();
  void write_row(const std::uint8_t* image, std::uint32_t y, std::uint8_t* out);
  std::uint8_t in_opencv_order(const std::uint8_t* image, std::uint32_t y, std::uint32_t x,
                               std::uint32_t channel) const;

  AreaAxis rows_;
  AreaAxis columns_;
  std::uint32_t num_channels_;
  Rule rule_;
  float half_width_;          // of the band around a half in which the order of operations matters
  std::vector<Sum> sums_;     // [width * channels] over the rows of one new pixel
  std::vector<float> means_;  // [new width * channels]
};

}  // namespace envfleet
