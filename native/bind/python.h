// Python and NumPy for all files of the binding. NumPy's table of functions is filled in by module.cc.
#pragma once

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL envfleet_numpy
#ifndef ENVFLEET_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <numpy/arrayobject.h>
#include <unistd.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace envfleet {

/// The GIL is dropped while this lives. When the interpreter ends meanwhile, Python ends a thread that wants the GIL
/// back by unwinding its stack, at which C++ would call std::terminate. Such a (daemon) thread waits here for the
/// process to end instead, as threads do since Python 3.14.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

void bind_area_resize(nb::module_& m);
void bind_shared_task_queues(nb::module_& m);
void bind_enums(nb::module_& m);
void bind_flight(nb::module_& m);
void bind_frame_player(nb::module_& m);
void bind_native_model(nb::module_& m);
void bind_native_pool(nb::module_& m);
void bind_xla_port(nb::module_& m);

}  // namespace envfleet
