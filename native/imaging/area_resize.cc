#include "imaging/area_resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace envfleet {

AreaAxis::AreaAxis(std::uint32_t from_size, std::uint32_t to_size) : from(from_size), to(to_size) {
  const std::uint32_t divisor = std::gcd(from, to);
  const std::uint32_t pixel_units = to / divisor;
  cell_units = from / divisor;
  num_taps = 1;
  for (std::uint32_t i = 0; i < to; ++i) {
    const std::uint32_t end = ((i + 1) * cell_units + pixel_units - 1) / pixel_units;
    num_taps = std::max(num_taps, end - i * cell_units / pixel_units);
  }
  weights.assign(std::size_t{to} * num_taps, 0);
  for (std::uint32_t i = 0; i < to; ++i) {
    const std::uint32_t start_unit = i * cell_units, end_unit = start_unit + cell_units;
    first.push_back(std::min(start_unit / pixel_units, from - num_taps));
    for (std::uint32_t tap = 0; tap < num_taps; ++tap) {
      const std::uint32_t unit = (first[i] + tap) * pixel_units;
      const std::uint32_t low = std::max(unit, start_unit), high = std::min(unit + pixel_units, end_unit);
      if (high > low) weights[std::size_t{i} * num_taps + tap] = static_cast<std::uint16_t>(high - low);
    }
  }

  constexpr double kNothing = 1e-3;  // OpenCV leaves smaller parts of a pixel out
  const double scale = static_cast<double>(from) / to;
  for (std::uint32_t i = 0; i < to; ++i) {
    const double start = i * scale, end = start + scale;
    const double length = std::min(scale, from - start);
    const auto last_whole = std::min(static_cast<std::uint32_t>(std::floor(end)), from - 1);
    const auto first_whole = std::min(static_cast<std::uint32_t>(std::ceil(start)), last_whole);
    float_begin.push_back(static_cast<std::uint32_t>(float_taps.size()));
    if (first_whole - start > kNothing) {
      float_taps.push_back({first_whole - 1, static_cast<float>((first_whole - start) / length)});
    }
    for (std::uint32_t source = first_whole; source < last_whole; ++source) {
      float_taps.push_back({source, static_cast<float>(1.0 / length)});
    }
    if (end - last_whole > kNothing) {
      const double part = std::min(std::min(end - last_whole, 1.0), length);
      float_taps.push_back({last_whole, static_cast<float>(part / length)});
    }
  }
  float_begin.push_back(static_cast<std::uint32_t>(float_taps.size()));
}

template <class Sum>
AreaResize<Sum>::AreaResize(ImageSize from, ImageSize to, std::uint32_t num_channels)
    : rows_(from.height, to.height),
      columns_(from.width, to.width),
      num_channels_(num_channels),
      sums_(std::size_t{from.width} * num_channels),
      means_(std::size_t{to.width} * num_channels) {
  const bool is_whole = from.height % to.height == 0 && from.width % to.width == 0;
  if (from.height == to.height && from.width == to.width) {
    rule_ = Rule::kCopy;
  } else if (is_whole && from.height == 2 * to.height && from.width == 2 * to.width) {
    rule_ = Rule::kHalf;
  } else {
    rule_ = is_whole ? Rule::kWhole : Rule::kGeneral;
  }
  // A sum of n rounded products of values up to 255 is off by less than 255 (n + 2) half units in the last place.
  half_width_ = 255.0f * static_cast<float>(rows_.num_taps + columns_.num_taps + 6) * 0x1p-23f;
}

template <class Sum>
void AreaResize<Sum>::run(const std::uint8_t* image, const std::uint8_t* row_changed, std::uint8_t* resized) {
  for (std::uint32_t y = 0; y < rows_.to; ++y) {
    if (!is_changed(row_changed, y)) continue;
    if (rule_ == Rule::kCopy) {
      std::memcpy(resized + sums_.size() * y, image + sums_.size() * y, sums_.size());
      continue;
    }
    sum_rows(image, y);
    write_row(image, y, resized + means_.size() * y);
  }
}

template <class Sum>
bool AreaResize<Sum>::is_changed(const std::uint8_t* row_changed, std::uint32_t y) const {
  if (row_changed == nullptr) return true;
  const std::uint8_t* first = row_changed + rows_.first[y];
  return std::any_of(first, first + rows_.num_taps, [](std::uint8_t changed) { return changed != 0; });
}

template <class Sum>
void AreaResize<Sum>::sum_rows(const std::uint8_t* image, std::uint32_t y) {
  const std::size_t length = sums_.size();
  const std::uint16_t* weight = &rows_.weights[std::size_t{y} * rows_.num_taps];
  const std::uint8_t* row = image + rows_.first[y] * length;
  Sum* sums = sums_.data();
  if (rows_.num_taps == 3) {  // from 210 rows to 84
    const Sum first = weight[0], second = weight[1], third = weight[2];
    for (std::size_t x = 0; x < length; ++x) {
      sums[x] = static_cast<Sum>(first * row[x] + second * row[x + length] + third * row[x + 2 * length]);
    }
    return;
  }
  std::fill_n(sums, length, Sum{0});
  for (std::uint32_t tap = 0; tap < rows_.num_taps; ++tap, row += length) {
    const Sum factor = weight[tap];
    for (std::size_t x = 0; x < length; ++x) sums[x] = static_cast<Sum>(sums[x] + factor * row[x]);
  }
}

/// `means_` from `sums_`. With the numbers known to the compiler (0: they are not) it takes a third of the time.
template <class Sum>
template <std::uint32_t kNumChannels, std::uint32_t kNumTaps>
void AreaResize<Sum>::mean_columns() {
  const std::uint32_t num_channels = kNumChannels ? kNumChannels : num_channels_;
  const std::uint32_t num_taps = kNumTaps ? kNumTaps : columns_.num_taps;
  const float per_unit = 1.0f / static_cast<float>(rows_.cell_units * columns_.cell_units);
  const std::uint32_t* first = columns_.first.data();
  const std::uint16_t* weight = columns_.weights.data();
  const Sum* sums = sums_.data();
  float* mean = means_.data();
  for (std::uint32_t x = 0; x < columns_.to; ++x, weight += num_taps) {
    for (std::uint32_t channel = 0; channel < num_channels; ++channel) {
      const Sum* sum = sums + std::size_t{first[x]} * num_channels + channel;
      Units units = 0;
      for (std::uint32_t tap = 0; tap < num_taps; ++tap)
        units += Units{weight[tap]} * static_cast<Units>(sum[tap * num_channels]);
      *mean++ = static_cast<float>(units) * per_unit;
    }
  }
}

template <class Sum>
void AreaResize<Sum>::write_row(const std::uint8_t* image, std::uint32_t y, std::uint8_t* out) {
  if (columns_.num_taps == 3 && num_channels_ == 1) {  // from 160 columns to 84
    mean_columns<1, 3>();
  } else if (columns_.num_taps == 3 && num_channels_ == 3) {
    mean_columns<3, 3>();
  } else {
    mean_columns<0, 0>();
  }

  const std::size_t length = means_.size();
  if (rule_ == Rule::kWhole || rule_ == Rule::kHalf) {  // here OpenCV has whole numbers, too
    for (std::size_t i = 0; i < length; ++i) {
      const float value = means_[i];
      out[i] = static_cast<std::uint8_t>(rule_ == Rule::kHalf ? value + 0.5f : std::nearbyint(value));
    }
    return;
  }
  int num_near_half = 0;
  for (std::size_t i = 0; i < length; ++i) {
    const int rounded = static_cast<int>(means_[i] + 0.5f);
    out[i] = static_cast<std::uint8_t>(rounded);
    num_near_half += std::fabs(std::fabs(means_[i] - static_cast<float>(rounded)) - 0.5f) < half_width_;
  }
  if (num_near_half == 0) return;
  for (std::uint32_t i = 0; i < length; ++i) {
    const float off = std::fabs(means_[i] - static_cast<float>(out[i]));
    if (std::fabs(off - 0.5f) < half_width_) out[i] = in_opencv_order(image, y, i / num_channels_, i % num_channels_);
  }
}

template <class Sum>
std::uint8_t AreaResize<Sum>::in_opencv_order(const std::uint8_t* image, std::uint32_t y, std::uint32_t x,
                                              std::uint32_t channel) const {
  float sum = 0;
  for (std::uint32_t row = rows_.float_begin[y]; row < rows_.float_begin[y + 1]; ++row) {
    const std::uint8_t* pixels = image + std::size_t{rows_.float_taps[row].source} * sums_.size() + channel;
    float part = 0;
    for (std::uint32_t column = columns_.float_begin[x]; column < columns_.float_begin[x + 1]; ++column) {
      const AreaAxis::FloatTap& tap = columns_.float_taps[column];
      part += static_cast<float>(pixels[std::size_t{tap.source} * num_channels_]) * tap.weight;
    }
    sum += rows_.float_taps[row].weight * part;
  }
  return static_cast<std::uint8_t>(std::clamp(std::nearbyint(sum), 0.0f, 255.0f));
}

template class AreaResize<std::uint16_t>;
template class AreaResize<std::uint32_t>;

}  // namespace envfleet
