// The module envfleet._native.core. Only this folder knows Python.
#define ENVFLEET_IMPORTS_NUMPY
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "bind/arrays.h"
#include "bind/python.h"

namespace envfleet {
namespace {

template <class Float>
bool any_nan(const void* memory, npy_intp size) {
  const auto* values = static_cast<const Float*>(memory);
  bool found = false;
  for (npy_intp i = 0; i < size; ++i) found |= values[i] != values[i];
  return found;
}

/// True if a contiguous float32 or float64 array has a NaN.
bool has_nan(nb::handle object) {
  auto* array = reinterpret_cast<PyArrayObject*>(object.ptr());
  if (!PyArray_Check(object.ptr()) || !PyArray_ISCARRAY_RO(array)) throw nb::type_error("expected a contiguous array");
  if (PyArray_TYPE(array) == NPY_FLOAT32) return any_nan<float>(PyArray_DATA(array), PyArray_SIZE(array));
  if (PyArray_TYPE(array) == NPY_FLOAT64) return any_nan<double>(PyArray_DATA(array), PyArray_SIZE(array));
  throw nb::type_error("expected float32 or float64");
}

/// Have the kernel kill this process when its parent dies, also if the parent is gone already.
void die_with_parent(int parent_pid) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent_pid) kill(getpid(), SIGKILL);
}

/// Become the parent of descendants whose own parents end, instead of init. Forked processes do not inherit this.
void adopt_orphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

bool import_numpy() {
  import_array1(false);
  return true;
}

}  // namespace
}  // namespace envfleet

NB_MODULE(core, m) {
  if (!envfleet::import_numpy()) throw nb::python_error();
  nb::set_leak_warnings(false);  // a daemon thread that is at work when the process ends keeps what it uses
  nb::class_<envfleet::Lease>(m, "Lease");

  nb::class_<envfleet::PyBatchStore>(m, "BatchStore")
      .def(nb::init<int, std::uint32_t, nb::sequence, nb::sequence, bool>(), "fd"_a, "num_rows"_a, "obs"_a, "infos"_a,
           "has_final"_a)
      .def("arrays", [](nb::handle self,
                        std::uint32_t buffer) { return nb::cast<envfleet::PyBatchStore&>(self).arrays(buffer, self); })
      .def_prop_ro("columns", &envfleet::PyBatchStore::columns)
      .def("by_name", [](const envfleet::PyBatchStore& self, nb::sequence values) { return self.by_name(values); })
      .def_prop_ro("num_buffers", [](envfleet::PyBatchStore& self) { return self.store->num_buffers(); })
      .def_prop_ro("num_leased", [](envfleet::PyBatchStore& self) { return self.store->num_leased(); });
  envfleet::batch_arrays_type = new envfleet::NamedTuple(
      m, "envfleet._native.core.BatchArrays",
      {"env_ids", "rewards", "terminated", "truncated", "row_flags", "obs", "final_obs", "infos", "final_infos"});

  envfleet::bind_enums(m);
  envfleet::bind_area_resize(m);
  envfleet::bind_shared_task_queues(m);
  envfleet::bind_flight(m);
  envfleet::bind_frame_player(m);
  envfleet::bind_native_model(m);
  envfleet::bind_xla_port(m);
  envfleet::bind_native_pool(m);
  m.def("has_nan", &envfleet::has_nan);
  m.def("die_with_parent", &envfleet::die_with_parent, "parent_pid"_a);
  m.def("adopt_orphans", &envfleet::adopt_orphans);
}
