// Flight, for the facade of every pool.
#include "engine/flight.h"

#include "bind/arrays.h"
#include "bind/python.h"

namespace envfleet {

namespace {

void set(Flight& flight, nb::handle env_ids, bool is_in_flight) {
  if (env_ids.is_none()) return flight.set_all(is_in_flight);
  const auto [ids, num_ids] = int32_vector(env_ids, "env_ids");
  flight.set(ids, num_ids, is_in_flight);
}

}  // namespace

void bind_flight(nb::module_& m) {
  nb::class_<Flight>(m, "Flight")
      .def(nb::init<std::size_t>(), "num_envs"_a)
      .def("check",
           [](Flight& self, nb::handle env_ids) {
             const auto [ids, num_ids] = int32_vector(env_ids, "env_ids");
             return self.check(ids, num_ids);
           })
      .def(
          "sent", [](Flight& self, nb::handle env_ids) { set(self, env_ids, true); }, "env_ids"_a.none())
      .def(
          "landed", [](Flight& self, nb::handle env_ids) { set(self, env_ids, false); }, "env_ids"_a.none())
      .def_prop_ro("num_in_flight", &Flight::num_in_flight)
      .def_prop_ro("env_ids", [](Flight& self) {
        nb::list env_ids;
        for (std::size_t i = 0; i < self.is_in_flight().size(); ++i) {
          if (self.is_in_flight()[i]) env_ids.append(i);
        }
        return env_ids;
      });
}

}  // namespace envfleet
