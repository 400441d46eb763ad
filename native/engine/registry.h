// The list of native environments: what ENVFLEET_ENV adds to it, and how a pool gets its envs from it.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/env_array.h"

namespace envfleet {

/// What all envs of a pool share, whatever their type.
class AnyModel {
 public:
  virtual ~AnyModel() = default;
  virtual Spec spec() const = 0;
  virtual std::unique_ptr<EnvArray> make_envs(std::uint32_t num_envs, EpisodeRules rules, RowLayout layout) const = 0;
};

template <NativeEnv Env>
class ModelOf final : public AnyModel {
 public:
  explicit ModelOf(const Kwargs& kwargs) : model_(std::make_shared<const typename Env::Model>(kwargs)) {}

  Spec spec() const override { return model_->spec(); }
  std::unique_ptr<EnvArray> make_envs(std::uint32_t num_envs, EpisodeRules rules, RowLayout layout) const override {
    return std::make_unique<EnvArrayOf<Env>>(model_, num_envs, rules, layout);
  }

 private:
  std::shared_ptr<const typename Env::Model> model_;
};

using MakeModel = std::shared_ptr<const AnyModel> (*)(const Kwargs&);

struct RegisteredEnv {
  std::string name;
  MakeModel make_model;
};

inline std::vector<RegisteredEnv>& registered_envs() {
  static std::vector<RegisteredEnv> envs;
  return envs;
}

/// The model that `registered` makes from `values`. Refuses arguments that the environment does not know.
inline std::shared_ptr<const AnyModel> make_model(const RegisteredEnv& registered, Values values) {
  std::set<std::string> asked;
  const Kwargs kwargs(std::move(values), &asked);
  std::shared_ptr<const AnyModel> model = registered.make_model(kwargs);
  kwargs.require_all_asked();
  return model;
}

struct Registration {
  Registration(const char* name, MakeModel make_model) { registered_envs().push_back({name, make_model}); }
};

/// Add a native environment to the list. Stands below its struct, in the namespace of the struct.
#define ENVFLEET_ENV(name, Env)                                                                   \
  static_assert(::envfleet::NativeEnv<Env>, #Env " is no native environment: see engine/env.h");  \
  inline const ::envfleet::Registration kRegistrationOf##Env(                                     \
      name, [](const ::envfleet::Kwargs& kwargs) -> std::shared_ptr<const ::envfleet::AnyModel> { \
        return std::make_shared<const ::envfleet::ModelOf<Env>>(kwargs);                          \
      })

/// What a library of environments that was compiled apart exports as `envfleet_plugin`.
struct Plugin {
  std::uint32_t abi;
  const std::vector<RegisteredEnv>* envs;
};
#ifndef ENVFLEET_PLUGIN_ABI  // the build makes it from the text of these headers
#define ENVFLEET_PLUGIN_ABI 0
#endif
inline constexpr std::uint32_t kPluginAbi = ENVFLEET_PLUGIN_ABI;

#define ENVFLEET_PLUGIN()                                                                  \
  extern "C" __attribute__((visibility("default"))) ::envfleet::Plugin envfleet_plugin() { \
    return {::envfleet::kPluginAbi, &::envfleet::registered_envs()};                       \
  }                                                                                        \
  static_assert(true)

}  // namespace envfleet
