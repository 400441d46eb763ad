// NamedTuple: a Python type with named fields, whose objects cost no more than tuples.
#pragma once

#include <initializer_list>
#include <vector>

#include "bind/python.h"

namespace envfleet {

/// Python sees a named tuple (a struct sequence). Made once, for the life of the process.
class NamedTuple {
 public:
  /// `qualified_name` is the module's and the type's; literals, all of them: Python keeps the pointers.
  NamedTuple(nb::module_& m, const char* qualified_name, std::initializer_list<const char*> field_names) {
    std::vector<PyStructSequence_Field> fields;
    for (const char* name : field_names) fields.push_back({name, nullptr});
    fields.push_back({nullptr, nullptr});
    PyStructSequence_Desc description{qualified_name, nullptr, fields.data(), static_cast<int>(field_names.size())};
    type_ = PyStructSequence_NewType(&description);
    if (type_ == nullptr) throw nb::python_error();
    const nb::handle type(reinterpret_cast<PyObject*>(type_));
    m.attr(type.attr("__name__")) = type;
  }

  /// An object with these values, in the order of the field names.
  template <class... Values>
  nb::object operator()(Values&&... values) const {
    nb::object tuple = nb::steal(PyStructSequence_New(type_));
    if (!tuple.is_valid()) throw nb::python_error();
    Py_ssize_t i = 0;
    (PyStructSequence_SetItem(tuple.ptr(), i++, nb::cast(std::forward<Values>(values)).release().ptr()), ...);
    return tuple;
  }

 private:
  PyTypeObject* type_;
};

}  // namespace envfleet
