// Batches as NumPy sees them: arrays over a buffer, and the lease that gives it back when the last of them dies.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/python.h"
#include "engine/batch_store.h"
#include "engine/gate.h"

namespace envfleet {

inline Deadline deadline_in(double timeout_s) {
  constexpr double kLongest = 365.0 * 24 * 3600;  // also for infinity
  const double bounded_s = timeout_s > 0 ? std::min(timeout_s, kLongest) : 0.0;
  return Clock::now() + std::chrono::nanoseconds(static_cast<std::int64_t>(bounded_s * 1e9));
}

/// One array of a batch as NumPy sees it.
struct ArrayField {
  std::size_t offset;
  nb::object dtype;
  std::vector<npy_intp> shape;  // with the rows in front
};

/// A BatchStore and how its fields look as arrays.
class PyBatchStore {
 public:
  PyBatchStore(int fd, std::uint32_t num_rows, std::size_t buffer_bytes, nb::sequence fields) {
    BatchLayout layout{num_rows, buffer_bytes, {}};
    for (nb::handle item : fields) {
      const auto field = nb::cast<nb::tuple>(item);
      ArrayField array{nb::cast<std::size_t>(field[0]), nb::borrow(field[1]), {num_rows}};
      if (!PyArray_DescrCheck(array.dtype.ptr())) throw nb::type_error("a field's dtype must be a numpy.dtype");
      std::size_t row_bytes = PyDataType_ELSIZE(reinterpret_cast<PyArray_Descr*>(array.dtype.ptr()));
      for (nb::handle dim : nb::cast<nb::tuple>(field[2])) {
        array.shape.push_back(nb::cast<npy_intp>(dim));
        row_bytes *= static_cast<std::size_t>(array.shape.back());
      }
      if (array.offset + num_rows * row_bytes > buffer_bytes) throw nb::value_error("a field ends outside its buffer");
      layout.fields.push_back({array.offset, row_bytes});
      fields_.push_back(std::move(array));
    }
    if (fields_.size() < kNumFixedFields) throw nb::value_error("a batch has at least the fixed fields");
    store = std::make_shared<BatchStore>(fd, std::move(layout));
  }

  /// One array over a buffer's memory; it keeps `owner` alive.
  nb::object array(std::size_t i, std::byte* memory, nb::handle owner) const {
    const ArrayField& field = fields_[i];
    PyObject* dtype = field.dtype.ptr();
    Py_INCREF(dtype);  // PyArray_NewFromDescr takes this reference over
    nb::object array = nb::steal(PyArray_NewFromDescr(&PyArray_Type, reinterpret_cast<PyArray_Descr*>(dtype),
                                                      static_cast<int>(field.shape.size()), field.shape.data(), nullptr,
                                                      memory + field.offset, NPY_ARRAY_CARRAY, nullptr));
    if (!array.is_valid()) throw nb::python_error();
    // SetBaseObject takes its reference over, also if it fails.
    if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.ptr()), owner.inc_ref().ptr()) < 0) {
      throw nb::python_error();
    }
    return array;
  }

  /// Arrays over the fields [first, end) of a buffer.
  nb::tuple arrays(std::uint32_t buffer, nb::handle owner, std::size_t first, std::size_t end) const {
    std::byte* memory = store->memory(buffer);
    nb::object arrays = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(end - first)));
    if (!arrays.is_valid()) throw nb::python_error();
    for (std::size_t i = first; i < end; ++i) {
      PyTuple_SET_ITEM(arrays.ptr(), static_cast<Py_ssize_t>(i - first), array(i, memory, owner).release().ptr());
    }
    return nb::borrow<nb::tuple>(arrays);
  }
  nb::tuple arrays(std::uint32_t buffer, nb::handle owner) const { return arrays(buffer, owner, 0, fields_.size()); }

  std::shared_ptr<BatchStore> store;

 private:
  std::vector<ArrayField> fields_;
};

/// The base of all arrays of one batch: when the last of them dies, the buffer goes back to its store.
class Lease {
 public:
  Lease(std::shared_ptr<BatchStore> store, std::uint32_t buffer) : store_(std::move(store)), buffer_(buffer) {}
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { store_->give_back(buffer_); }

 private:
  std::shared_ptr<BatchStore> store_;
  std::uint32_t buffer_;
};

/// A lease inside its Python object: one allocation, and that by Python.
inline nb::object make_lease(std::shared_ptr<BatchStore> store, std::uint32_t buffer) {
  nb::object lease = nb::inst_alloc(nb::type<Lease>());
  new (nb::inst_ptr<Lease>(lease)) Lease(std::move(store), buffer);
  nb::inst_mark_ready(lease);
  return lease;
}

/// The elements of a contiguous vector of int32.
inline std::pair<const std::int32_t*, std::size_t> int32_vector(nb::handle object, const char* name) {
  auto* vector = reinterpret_cast<PyArrayObject*>(object.ptr());
  if (!PyArray_Check(object.ptr()) || PyArray_TYPE(vector) != NPY_INT32 || PyArray_NDIM(vector) != 1 ||
      !PyArray_ISCARRAY_RO(vector)) {
    throw nb::type_error((std::string(name) + " must be a contiguous vector of int32").c_str());
  }
  return {static_cast<const std::int32_t*>(PyArray_DATA(vector)), static_cast<std::size_t>(PyArray_DIM(vector, 0))};
}

}  // namespace envfleet
