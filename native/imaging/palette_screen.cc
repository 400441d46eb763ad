#include "imaging/palette_screen.h"

#include <algorithm>
#include <cstring>

namespace envfleet {

PaletteScreen::PaletteScreen(ImageSize screen, ImageSize image, std::uint32_t num_channels)
    : screen_(screen),
      num_channels_(num_channels),
      shown_(std::size_t{screen.height} * screen.width * num_channels),
      row_changed_(screen.height, 1),
      image_(std::size_t{image.height} * image.width * num_channels),
      resize_(screen, image, num_channels) {
  palette_.fill(kUnknown);
  for (Shown& part : parts_) {
    part.indices.resize(std::size_t{screen.height} * screen.width);
    part.differs.resize(screen.height);
  }
}

void PaletteScreen::learn(const std::uint8_t* indices, const std::uint8_t* colours) {
  for (std::size_t i = 0; i < std::size_t{screen_.height} * screen_.width; ++i) {
    std::uint32_t colour = 0;
    for (std::uint32_t c = 0; c < num_channels_; ++c) colour |= std::uint32_t{colours[i * num_channels_ + c]} << 8 * c;
    palette_[indices[i]] = colour;
  }
}

bool PaletteScreen::knows(const std::uint8_t* indices, Part part) {
  Shown& shown = parts_[part];
  const std::size_t width = screen_.width;
  bool is_known = true;
  for (std::uint32_t y = 0; y < screen_.height; ++y) {
    const std::size_t start = y * width;
    shown.differs[y] = !shows_last_ || std::memcmp(indices + start, &shown.indices[start], width) != 0;
    if (shown.differs[y]) is_known = knows_row(indices + start) && is_known;
  }
  return is_known;
}

bool PaletteScreen::knows_row(const std::uint8_t* indices) const {
  std::uint32_t met = 0;
  for (std::uint32_t x = 0; x < screen_.width; ++x) met |= palette_[indices[x]];
  return (met & kUnknown) == 0;
}

void PaletteScreen::show(const std::uint8_t* indices, const std::uint8_t* other) {
  if (other == nullptr) {
    other = indices;
    knows(other, kOther);
  }
  auto& [last_shown, other_shown] = parts_;
  const std::size_t width = screen_.width;
  for (std::uint32_t y = 0; y < screen_.height; ++y) {
    if (!last_shown.differs[y] && !other_shown.differs[y]) continue;
    const std::size_t start = y * width;
    write_row(indices + start, y, false);
    if (std::memcmp(indices + start, other + start, width) != 0) write_row(other + start, y, true);
    if (last_shown.differs[y]) std::memcpy(&last_shown.indices[start], indices + start, width);
    if (other_shown.differs[y]) std::memcpy(&other_shown.indices[start], other + start, width);
  }
  shows_last_ = true;
}

void PaletteScreen::add(const std::uint8_t* indices) {
  for (std::uint32_t y = 0; y < screen_.height; ++y) write_row(indices + std::size_t{y} * screen_.width, y, true);
  shows_last_ = false;
}

void PaletteScreen::set_shown(const std::uint8_t* colours) {
  std::memcpy(shown_.data(), colours, shown_.size());
  std::fill(row_changed_.begin(), row_changed_.end(), std::uint8_t{1});
  shows_last_ = false;
}

void PaletteScreen::write_image(std::uint8_t* image) {
  resize_.run(shown_.data(), row_changed_.data(), image_.data());
  std::fill(row_changed_.begin(), row_changed_.end(), std::uint8_t{0});
  std::memcpy(image, image_.data(), image_.size());
}

void PaletteScreen::write_row(const std::uint8_t* indices, std::uint32_t y, bool is_brighter) {
  if (num_channels_ == 1) return is_brighter ? write_row<1, true>(indices, y) : write_row<1, false>(indices, y);
  return is_brighter ? write_row<3, true>(indices, y) : write_row<3, false>(indices, y);
}

template <std::uint32_t kNumChannels, bool kIsBrighter>
void PaletteScreen::write_row(const std::uint8_t* indices, std::uint32_t y) {
  constexpr std::uint32_t kBytes = kRun * kNumChannels;
  std::uint8_t* row = &shown_[std::size_t{y} * screen_.width * kNumChannels];
  std::uint8_t colours[kBytes];
  std::uint64_t last_run = 0;
  bool changed = false;
  for (std::uint32_t x = 0; x < screen_.width; x += kRun, row += kBytes) {
    std::uint64_t run;
    std::memcpy(&run, indices + x, kRun);
    if (run != last_run || x == 0) {
      for (std::uint32_t i = 0; i < kRun; ++i) {
        const std::uint32_t colour = palette_[indices[x + i]];
        for (std::uint32_t c = 0; c < kNumChannels; ++c) {
          colours[i * kNumChannels + c] = static_cast<std::uint8_t>(colour >> 8 * c);
        }
      }
      last_run = run;
    }
    std::uint8_t next[kBytes];
    for (std::uint32_t i = 0; i < kBytes; ++i) next[i] = kIsBrighter ? std::max(row[i], colours[i]) : colours[i];
    changed |= std::memcmp(next, row, kBytes) != 0;
    std::memcpy(row, next, kBytes);
  }
  if (changed) row_changed_[y] = 1;
}

}  // namespace envfleet
