// PaletteScreen, for Atari envs in their processes: checks arrays.
#include "imaging/palette_screen.h"

#include <new>
#include <string>
#include <utility>

#include "bind/python.h"

namespace envfleet {
namespace {

std::uint8_t* bytes_of(nb::handle object, std::size_t num_bytes, const char* name, bool is_written) {
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

std::size_t num_pixels(const PaletteScreen& screen) {
  return std::size_t{screen.screen().height} * screen.screen().width;
}

const std::uint8_t* indices_of(const PaletteScreen& screen, nb::handle indices) {
  return bytes_of(indices, num_pixels(screen), "a screen", false);
}

using Pair = std::pair<std::uint32_t, std::uint32_t>;

void init(PaletteScreen* self, Pair screen, Pair image, std::uint32_t num_channels) {
  if (num_channels != 1 && num_channels != 3) throw nb::value_error("num_channels must be 1 (grey) or 3 (RGB)");
  if (screen.second % PaletteScreen::kRun != 0) throw nb::value_error("a screen's width must be a multiple of 8");
  for (auto [from, to] : {std::pair{screen.first, image.first}, {screen.second, image.second}}) {
    if (to < 1 || to > from || from > AreaResize::kLargest) {
      throw nb::value_error("an image has between 1 pixel and as many as the screen (at most 257) along each axis");
    }
  }
  new (self) PaletteScreen(ImageSize{screen.first, screen.second}, ImageSize{image.first, image.second}, num_channels);
}

}  // namespace

void bind_palette_screen(nb::module_& m) {
  nb::class_<PaletteScreen>(m, "PaletteScreen")
      .def("__init__", &init, "screen"_a, "image"_a, "num_channels"_a)
      .def("learn",
           [](PaletteScreen& self, nb::handle indices, nb::handle colours) {
             const std::size_t num_bytes = num_pixels(self) * self.num_channels();
             self.learn(indices_of(self, indices), bytes_of(colours, num_bytes, "colours", false));
           })
      .def(
          "show",
          [](PaletteScreen& self, nb::handle indices, nb::handle other) {
            self.show(indices_of(self, indices), other.is_none() ? nullptr : indices_of(self, other));
          },
          "indices"_a, "other"_a.none() = nb::none())
      .def("knows", [](PaletteScreen& self, nb::handle indices) { return self.knows(indices_of(self, indices)); })
      .def("add", [](PaletteScreen& self, nb::handle indices) { self.add(indices_of(self, indices)); })
      .def("write_image", [](PaletteScreen& self, nb::handle image) {
        self.write_image(bytes_of(image, self.image_bytes(), "the image", true));
      });
}

}  // namespace envfleet
