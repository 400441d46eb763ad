// Batches as NumPy sees them: arrays over a buffer, and the lease that gives it back when the last of them dies.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/named_tuple.h"
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
  nb::object dtype;
  std::vector<npy_intp> shape;  // with the rows in front
  std::size_t offset = 0;       // in a buffer

  std::size_t row_bytes() const {
    std::size_t bytes = PyDataType_ELSIZE(reinterpret_cast<PyArray_Descr*>(dtype.ptr()));
    for (std::size_t i = 1; i < shape.size(); ++i) bytes *= static_cast<std::size_t>(shape[i]);
    return bytes;
  }
};

/// The arrays of a batch by name: `obs` and `final_obs` are tuples of arrays, `infos` and `final_infos` tuples of pairs
/// (values, mask).
inline const NamedTuple* batch_arrays_type = nullptr;

/// A BatchStore and how its fields look as arrays.
class PyBatchStore {
 public:
  /// `obs` and `infos` have (dtype, shape of one row) for each array.
  PyBatchStore(int fd, std::uint32_t num_rows, nb::sequence obs, nb::sequence infos, bool has_final)
      : rows_{nb::len(obs), nb::len(infos), has_final} {
    for (const int type : {NPY_INT32, NPY_FLOAT64, NPY_BOOL, NPY_BOOL, NPY_UINT8}) {  // as in FixedField
      fields_.push_back({dtype_of(type), {num_rows}});
    }
    const std::vector<ArrayField> obs_fields = fields_of(obs, num_rows), info_fields = fields_of(infos, num_rows);
    std::vector<std::size_t> obs_bytes, info_bytes;
    for (const ArrayField& field : obs_fields) obs_bytes.push_back(field.row_bytes());
    for (const ArrayField& field : info_fields) info_bytes.push_back(field.row_bytes());
    for (int i = 0; i < (has_final ? 2 : 1); ++i) fields_.insert(fields_.end(), obs_fields.begin(), obs_fields.end());
    for (int i = 0; i < (has_final ? 2 : 1); ++i) {
      for (const ArrayField& field : info_fields)
        fields_.insert(fields_.end(), {field, {dtype_of(NPY_BOOL), {num_rows}}});
    }
    BatchLayout layout = lay_out(num_rows, rows_.row_bytes(obs_bytes, info_bytes));
    for (std::size_t i = 0; i < fields_.size(); ++i) fields_[i].offset = layout.fields[i].offset;
    store = std::make_shared<BatchStore>(fd, std::move(layout));
  }

  const RowLayout& rows() const { return rows_; }

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

  /// The arrays over a buffer, all of which keep `owner` alive.
  nb::object arrays(std::uint32_t buffer, nb::handle owner) const {
    std::byte* memory = store->memory(buffer);
    return by_name([&](std::size_t i) { return array(i, memory, owner); });
  }

  /// A value for each array of a batch, in the order of columns(), by the names of the arrays.
  nb::object by_name(nb::sequence values) const {
    if (nb::len(values) != fields_.size()) throw nb::value_error("a value for each array of a batch");
    return by_name([&](std::size_t i) -> nb::object { return values[i]; });
  }

  /// (dtype, shape) of each array of a batch.
  nb::list columns() const {
    nb::list all;
    for (const ArrayField& field : fields_) {
      nb::list shape;
      for (const npy_intp dim : field.shape) shape.append(dim);
      all.append(nb::make_tuple(field.dtype, nb::tuple(shape)));
    }
    return all;
  }

  /// A tuple of the observation's arrays.
  nb::object obs(std::byte* memory, nb::handle owner) const {
    return tuple_of(rows_.num_obs, [&](std::size_t i) { return array(rows_.obs() + i, memory, owner); });
  }

  std::shared_ptr<BatchStore> store;

 private:
  static nb::object dtype_of(int numpy_type) {
    return nb::steal(reinterpret_cast<PyObject*>(PyArray_DescrFromType(numpy_type)));
  }

  static std::vector<ArrayField> fields_of(nb::sequence columns, std::uint32_t num_rows) {
    std::vector<ArrayField> fields;
    for (nb::handle item : columns) {
      const auto [dtype, shape] = nb::cast<std::pair<nb::object, nb::tuple>>(item);
      if (!PyArray_DescrCheck(dtype.ptr())) throw nb::type_error("the dtype of an array must be a numpy.dtype");
      fields.push_back({dtype, {num_rows}});
      for (nb::handle dim : shape) fields.back().shape.push_back(nb::cast<npy_intp>(dim));
    }
    return fields;
  }

  template <class Item>
  static nb::object tuple_of(std::size_t num_items, Item&& item) {
    nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(num_items)));
    if (!tuple.is_valid()) throw nb::python_error();
    for (std::size_t i = 0; i < num_items; ++i) {
      PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), item(i).release().ptr());
    }
    return tuple;
  }

  /// `value(i)` is that of field i.
  template <class Value>
    requires std::invocable<Value, std::size_t>
  nb::object by_name(const Value& value) const {
    const auto leaves = [&](std::size_t first, std::size_t num_leaves) {
      return tuple_of(num_leaves, [&](std::size_t i) { return value(first + i); });
    };
    const auto infos = [&](std::size_t first, std::size_t num_infos) {
      return tuple_of(num_infos, [&](std::size_t i) -> nb::object {
        return nb::make_tuple(value(first + 2 * i), value(first + 2 * i + 1));
      });
    };
    return (*batch_arrays_type)(
        value(kEnvIds), value(kRewards), value(kTerminated), value(kTruncated), value(kRowFlags),
        leaves(rows_.obs(), rows_.num_obs), leaves(rows_.final_obs(), rows_.has_final ? rows_.num_obs : 0),
        infos(rows_.infos(), rows_.num_infos), infos(rows_.final_infos(), rows_.has_final ? rows_.num_infos : 0));
  }

  RowLayout rows_;
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
