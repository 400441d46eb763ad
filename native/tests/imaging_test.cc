// AreaResize and PaletteScreen: means of areas, screens seen again, no byte outside. (OpenCV is compared with in
// Python.)
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "imaging/area_resize.h"
#include "imaging/palette_screen.h"
#include "tests/check.h"

namespace envfleet::test {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes noise(std::size_t size, unsigned seed) {
  std::minstd_rand random(seed);
  Bytes bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random() >> 7);
  return bytes;
}

/// How much of [start, end) pixel `i` covers.
double overlap(double start, double end, std::uint32_t i) {
  return std::max(0.0, std::min(end, i + 1.0) - std::max(start, static_cast<double>(i)));
}

double mean(const Bytes& image, ImageSize from, ImageSize to, std::uint32_t num_channels, std::uint32_t y,
            std::uint32_t x, std::uint32_t channel) {
  const double height = static_cast<double>(from.height) / to.height,
               width = static_cast<double>(from.width) / to.width;
  double sum = 0;
  for (std::uint32_t row = 0; row < from.height; ++row) {
    const double part = overlap(y * height, (y + 1) * height, row);
    if (part == 0) continue;
    for (std::uint32_t column = 0; column < from.width; ++column) {
      const double weight = part * overlap(x * width, (x + 1) * width, column);
      sum += weight * image[(std::size_t{row} * from.width + column) * num_channels + channel];
    }
  }
  return sum / (height * width);
}

void resize_gives_means() {
  const ImageSize from{30, 24};
  for (const ImageSize to : {ImageSize{12, 13}, {30, 24}, {15, 12}, {10, 8}, {1, 1}, {29, 23}, {30, 7}}) {
    for (const std::uint32_t num_channels : {1u, 3u}) {
      const Bytes image = noise(std::size_t{from.height} * from.width * num_channels, to.height);
      Bytes resized(std::size_t{to.height} * to.width * num_channels);
      const Bytes changed(from.height, 1);
      AreaResize<std::uint16_t>(from, to, num_channels).run(image.data(), changed.data(), resized.data());
      Bytes again(resized.size());
      AreaResize<std::uint32_t>(from, to, num_channels).run(image.data(), nullptr, again.data());
      CHECK(again == resized);
      double largest = 0;
      for (std::uint32_t i = 0; i < resized.size(); ++i) {
        const std::uint32_t pixel = i / num_channels;
        const double exact = mean(image, from, to, num_channels, pixel / to.width, pixel % to.width, i % num_channels);
        largest = std::max(largest, std::fabs(exact - resized[i]));
      }
      CHECK(largest < 0.501);
    }
  }
}

void rows_that_did_not_change_stay() {
  const ImageSize from{30, 24}, to{12, 12};
  const Bytes image = noise(30 * 24, 1);
  Bytes changed(30, 0), resized(12 * 12, 7);
  AreaResize<std::uint16_t> resize(from, to, 1);
  resize.run(image.data(), changed.data(), resized.data());
  CHECK(resized == Bytes(12 * 12, 7));
  changed[2] = 1;  // half of it belongs to row 0, half to row 1
  resize.run(image.data(), changed.data(), resized.data());
  CHECK(!std::equal(resized.begin(), resized.begin() + 12, Bytes(12, 7).begin()));
  CHECK(!std::equal(resized.begin() + 12, resized.begin() + 24, Bytes(12, 7).begin()));
  CHECK(std::all_of(resized.begin() + 24, resized.end(), [](std::uint8_t value) { return value == 7; }));
}

void look_and_show(PaletteScreen& screen, const Bytes& last, const Bytes& other) {
  CHECK(screen.knows(other.data(), PaletteScreen::kOther) && screen.knows(last.data(), PaletteScreen::kLast));
  screen.show(last.data(), other.data());
}

void a_screen_seen_before_gives_the_same_image() {
  const ImageSize size{30, 24}, small{13, 11};
  for (const std::uint32_t num_channels : {1u, 3u}) {
    const Bytes first = noise(30 * 24, 1);
    Bytes second = first;
    for (int x = 100; x < 130; ++x) second[x] = 255 - second[x];
    const Bytes colours = noise(30 * 24 * num_channels, 3), more_colours = noise(30 * 24 * num_channels, 4);
    PaletteScreen used(size, small, num_channels);
    CHECK(!used.knows(first.data()));
    used.learn(first.data(), colours.data());
    CHECK(used.knows(first.data()));
    used.learn(second.data(), more_colours.data());
    CHECK(used.knows(second.data()) && used.knows(first.data()));
    PaletteScreen fresh = used;
    Bytes from_used(13 * 11 * num_channels), from_fresh(from_used.size());
    CHECK(used.knows(second.data()));
    used.show(second.data(), nullptr);
    used.write_image(from_used.data());
    CHECK(used.knows(first.data()));
    used.show(first.data(), nullptr);
    used.add(second.data());
    used.write_image(from_used.data());
    look_and_show(fresh, second, first);
    fresh.write_image(from_fresh.data());
    CHECK(from_used == from_fresh);
    look_and_show(used, second, first);
    used.write_image(from_used.data());
    CHECK(from_used == from_fresh);
    look_and_show(used, second, second);  // only the other one has changed
    look_and_show(used, second, first);
    used.write_image(from_used.data());
    CHECK(from_used == from_fresh);
  }
}

void what_was_shown_can_be_shown_elsewhere() {
  const ImageSize size{30, 24}, small{13, 11};
  const Bytes first = noise(30 * 24, 1), second = noise(30 * 24, 2);
  Bytes colours(30 * 24);
  PaletteScreen screen(size, small, 1);
  for (int index = 0; index < 256; ++index) {  // the colour of an index is the same everywhere
    Bytes one(30 * 24, static_cast<std::uint8_t>(index));
    std::fill(colours.begin(), colours.end(), static_cast<std::uint8_t>(255 - index));
    screen.learn(one.data(), colours.data());
  }
  PaletteScreen other = screen;
  Bytes expected(13 * 11), got(13 * 11);
  look_and_show(screen, first, second);
  screen.write_image(expected.data());
  look_and_show(other, second, second);
  other.write_image(got.data());
  CHECK(expected != got);
  other.set_shown(screen.shown().data());
  other.write_image(got.data());
  CHECK(expected == got);
  screen.add(second.data());
  other.add(second.data());
  look_and_show(screen, second, first);  // after both: nothing is taken for what was shown before
  look_and_show(other, second, first);
  CHECK(screen.shown() == other.shown());
}

}  // namespace

std::vector<Test> imaging_tests() {
  return {{"imaging: resize gives means", resize_gives_means},
          {"imaging: rows that did not change stay", rows_that_did_not_change_stay},
          {"imaging: a screen seen before gives the same image", a_screen_seen_before_gives_the_same_image},
          {"imaging: what was shown can be shown elsewhere", what_was_shown_can_be_shown_elsewhere}};
}

}  // namespace envfleet::test
