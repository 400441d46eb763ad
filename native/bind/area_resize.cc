// AreaResize for images of any size.
#include "imaging/area_resize.h"

#include <new>

#include "bind/images.h"
#include "bind/python.h"

namespace envfleet {
namespace {

using Resize = AreaResize<std::uint32_t>;

struct PyAreaResize {
  /// A new array [height, width, channels].
  nb::object operator()(nb::handle image) {
    const std::uint8_t* pixels = bytes_of(image, std::size_t{from.first} * from.second * num_channels, "image", false);
    npy_intp shape[3] = {to.first, to.second, num_channels};
    nb::object resized = nb::steal(PyArray_EMPTY(3, shape, NPY_UINT8, 0));
    if (!resized.is_valid()) throw nb::python_error();
    auto* array = reinterpret_cast<PyArrayObject*>(resized.ptr());
    resize.run(pixels, nullptr, static_cast<std::uint8_t*>(PyArray_DATA(array)));
    return resized;
  }

  Pair from, to;
  std::uint32_t num_channels;
  Resize resize;
};

void init(PyAreaResize* self, Pair from, Pair to, std::uint32_t num_channels) {
  for (auto [old_size, new_size] : {std::pair{from.first, to.first}, {from.second, to.second}}) {
    if (new_size < 1 || new_size > old_size || old_size > Resize::kLargest) {
      throw nb::value_error("images are made smaller, not larger, and have at most 65535 pixels along each axis");
    }
  }
  new (self)
      PyAreaResize{from, to, num_channels, Resize({from.first, from.second}, {to.first, to.second}, num_channels)};
}

}  // namespace

void bind_area_resize(nb::module_& m) {
  nb::class_<PyAreaResize>(m, "AreaResize")
      .def("__init__", &init, "from_size"_a, "to_size"_a, "num_channels"_a)
      .def("__call__", &PyAreaResize::operator(), "image"_a);
}

}  // namespace envfleet
