// PaletteScreen: screens of palette indices -> one small image: colours, the brighter of two screens, resize.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "imaging/area_resize.h"

namespace envfleet {

/// The palette is learned from examples, so that it need not be known: who emulates the console can show it.
class PaletteScreen {
 public:
  static constexpr std::uint32_t kRun = 8;  // pixels seen to at a time: a screen is mostly areas of one colour

  /// The screen's width is a multiple of kRun. `num_channels`: 1 for grey, 3 for RGB.
  PaletteScreen(ImageSize screen, ImageSize image, std::uint32_t num_channels);

  ImageSize screen() const { return screen_; }
  std::size_t image_bytes() const { return image_.size(); }
  std::uint32_t num_channels() const { return num_channels_; }

  /// Learn the colours of a screen: `colours` is [height, width, channels].
  void learn(const std::uint8_t* indices, const std::uint8_t* colours);

  /// Which of the two that are shown together.
  enum Part { kLast, kOther };

  /// Were all colours of this screen learned? To be asked of each before it is shown, in the same part.
  bool knows(const std::uint8_t* indices, Part part = kLast);

  /// Show a screen or, pixel by pixel, the brighter of two.
  void show(const std::uint8_t* indices, const std::uint8_t* other);

  /// Show the brighter of this screen and of what was shown last.
  void add(const std::uint8_t* indices);

  /// What is shown, as an image of [height, width, channels].
  void write_image(std::uint8_t* image);

  /// What is shown, as large as the screen: [height, width, channels].
  const std::vector<std::uint8_t>& shown() const { return shown_; }

  /// Show what shown() gave, of this screen or of another one of the same size.
  void set_shown(const std::uint8_t* colours);

 private:
  static constexpr std::uint32_t kUnknown = 1u << 31;

  bool knows_row(const std::uint8_t* indices) const;
  // A row of the screen, or the brighter of it and of what is there.
  template <std::uint32_t kNumChannels, bool kIsBrighter>
  void write_row(const std::uint8_t* indices, std::uint32_t y);
  void write_row(const std::uint8_t* indices, std::uint32_t y, bool is_brighter);

  ImageSize screen_;
  std::uint32_t num_channels_;
  std::array<std::uint32_t, 256> palette_;  // a byte for each channel, the first one lowest, or kUnknown
  std::vector<std::uint8_t> shown_;         // [height, width, channels]
  std::vector<std::uint8_t> row_changed_;   // [height] since the last image
  std::vector<std::uint8_t> image_;         // the last one
  // Most rows of a screen are those of the screen before: what was shown last, so that these rows cost nothing.
  struct Shown {
    std::vector<std::uint8_t> indices;  // [height, width]
    std::vector<std::uint8_t> differs;  // [height] from the screen that is to be shown next
  };
  std::array<Shown, 2> parts_;
  bool shows_last_ = false;  // `shown_` is the brighter of both parts
  AreaResize<std::uint16_t> resize_;
};

}  // namespace envfleet
