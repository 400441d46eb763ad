// Python values as C++ values (Kwargs), and what C++ declares (Space, Dtype) as Python values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bind/python.h"
#include "engine/kwargs.h"
#include "engine/space.h"

namespace envfleet {

inline bool is_number(nb::handle object) { return PyFloat_Check(object.ptr()) || PyIndex_Check(object.ptr()); }

inline double as_number(nb::handle object) {
  const double number = PyFloat_AsDouble(object.ptr());
  if (number == -1.0 && PyErr_Occurred()) throw nb::python_error();
  return number;
}

inline Value as_value(nb::handle object) {
  PyObject* raw = object.ptr();
  const bool is_scalar = PyArray_IsScalar(raw, Generic) != 0;  // np.float32 and the like
  if (PyBool_Check(raw)) return raw == Py_True;
  if (PyArray_IsScalar(raw, Bool)) return PyObject_IsTrue(raw) == 1;
  if (PyUnicode_Check(raw)) return nb::cast<std::string>(object);
  if (PyFloat_Check(raw) || (is_scalar && PyNumber_Check(raw) && !PyIndex_Check(raw) && !PyComplex_Check(raw))) {
    return as_number(object);
  }
  if (PyIndex_Check(raw) && (PyLong_Check(raw) || is_scalar)) {
    std::int64_t number = 0;
    if (nb::try_cast(nb::steal(PyNumber_Index(raw)), number)) return number;
    return as_number(object);  // larger ones
  }
  if (PyList_Check(raw) || PyTuple_Check(raw)) {
    std::vector<double> numbers;
    std::vector<std::string> texts;
    for (nb::handle item : object) {
      if (is_number(item)) numbers.push_back(as_number(item));
      if (PyUnicode_Check(item.ptr())) texts.push_back(nb::cast<std::string>(item));
    }
    const auto size = static_cast<std::size_t>(PySequence_Size(raw));
    if (texts.size() == size && size > 0) return texts;
    if (numbers.size() == size) return numbers;
  }
  return Foreign{nb::cast<std::string>(nb::str(object.type().attr("__name__")))};
}

inline Values as_values(nb::handle dict) {
  Values values;
  for (auto [key, value] : nb::cast<nb::dict>(dict)) values[nb::cast<std::string>(nb::str(key))] = as_value(value);
  return values;
}

struct DtypeInNumpy {
  const char* name;
  int type;
};

inline const DtypeInNumpy& in_numpy(Dtype dtype) {
  static constexpr DtypeInNumpy kDtypes[] = {// in the order of Dtype
                                             {"bool", NPY_BOOL},      {"int8", NPY_INT8},   {"uint8", NPY_UINT8},
                                             {"int32", NPY_INT32},    {"int64", NPY_INT64}, {"float32", NPY_FLOAT32},
                                             {"float64", NPY_FLOAT64}};
  return kDtypes[static_cast<std::size_t>(dtype)];
}

/// (kind, dtype, shape, low, high, num_values, keys, parts), as envfleet.pool.native.spaces reads it.
inline nb::tuple space_as_tuple(const Space& space) {
  static const char* const kKinds[] = {"box", "discrete", "multi_discrete", "multi_binary", "dict", "tuple"};
  nb::list parts;
  for (const Space& part : space.parts) parts.append(space_as_tuple(part));
  return nb::make_tuple(kKinds[static_cast<std::size_t>(space.kind)], in_numpy(space.dtype).name,
                        nb::tuple(nb::cast(space.shape)), nb::cast(space.low), nb::cast(space.high),
                        nb::cast(space.num_values), nb::cast(space.keys), parts);
}

}  // namespace envfleet
