// NativeModel and load_plugin: which native environments there are, and one of them with its arguments.
#include "bind/native_model.h"

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind/python.h"
#include "bind/values.h"

namespace envfleet {
namespace {

/// The environments of plugins that were loaded into this process.
std::vector<RegisteredEnv>& plugin_envs() {
  static std::vector<RegisteredEnv> envs;
  return envs;
}

const RegisteredEnv* find_env(const std::string& name) {
  for (const auto* envs : {&plugin_envs(), &registered_envs()}) {
    // From the end: a plugin that was changed and loaded again replaces its older self.
    const auto found = std::find_if(envs->rbegin(), envs->rend(), [&](const auto& env) { return env.name == name; });
    if (found != envs->rend()) return &*found;
  }
  return nullptr;
}

std::vector<std::string> load_plugin(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open: its code may run at any time
  if (library == nullptr) throw std::runtime_error(dlerror());
  const auto plugin_function = reinterpret_cast<Plugin (*)()>(dlsym(library, "envfleet_plugin"));
  if (plugin_function == nullptr) throw std::runtime_error(path + " does not call ENVFLEET_PLUGIN()");
  const Plugin plugin = plugin_function();
  if (plugin.abi != kPluginAbi) {
    throw std::runtime_error(path + " was compiled with another version of EnvFleet: compile it again");
  }
  std::vector<std::string> names;
  for (const RegisteredEnv& env : *plugin.envs) {
    plugin_envs().push_back(env);
    names.push_back(env.name);
  }
  return names;
}

PyModel make_py_model(const std::string& name, nb::dict kwargs) {
  const RegisteredEnv* env = find_env(name);
  if (env == nullptr) throw nb::value_error(("no native environment is called '" + name + "'").c_str());
  std::shared_ptr<const AnyModel> model = make_model(*env, as_values(kwargs));
  Spec spec = model->spec();
  return {std::move(model), std::move(spec)};
}

}  // namespace

void bind_native_model(nb::module_& m) {
  m.def("load_plugin", &load_plugin, "path"_a);
  m.attr("PLUGIN_ABI") = kPluginAbi;

  nb::class_<PyModel>(m, "NativeModel")
      .def("__init__", [](PyModel* self, const std::string& name,
                          nb::dict kwargs) { new (self) PyModel(make_py_model(name, std::move(kwargs))); })
      .def_prop_ro("observation_space", [](PyModel& self) { return space_as_tuple(self.spec.observation); })
      .def_prop_ro("action_space", [](PyModel& self) { return space_as_tuple(self.spec.action); })
      .def_prop_ro(
          "infos",
          [](PyModel& self) {
            nb::list fields;
            for (const InfoField& field : self.spec.infos) {
              fields.append(nb::make_tuple(field.name, in_numpy(field.dtype).name, nb::tuple(nb::cast(field.shape))));
            }
            return fields;
          })
      .def_prop_ro("max_episode_steps", [](PyModel& self) { return self.spec.max_episode_steps; })
      .def_prop_ro("step_s", [](PyModel& self) { return self.spec.step_s; });
}

}  // namespace envfleet
