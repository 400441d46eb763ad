// The environments on MuJoCo: several on several threads, saved and restored. ENVFLEET_MUJOCO_MODELS: Gymnasium's
// files.
#include <string>
#include <utility>
#include <vector>

#include "tests/plugins/plugin_pool.h"
#include "tests/runner.h"

namespace envfleet::test {
namespace {

void mujoco_envs() {
  const std::pair<const char*, const char*> envs[] = {
      {"Ant-v5", "ant"},
      {"Ant-v4", "ant"},
      {"HalfCheetah-v5", "half_cheetah"},
      {"Hopper-v5", "hopper"},
      {"Walker2d-v5", "walker2d_v5"},
      {"Humanoid-v5", "humanoid"},
      {"Humanoid-v4", "humanoid"},
      {"HumanoidStandup-v5", "humanoidstandup"},
      {"Swimmer-v5", "swimmer"},
      {"Reacher-v5", "reacher"},
      {"Pusher-v5", "pusher_v5"},
      {"InvertedPendulum-v5", "inverted_pendulum"},
      {"InvertedDoublePendulum-v5", "inverted_double_pendulum"},
  };
  for (const auto& [name, file] : envs) {
    const std::string path = std::string(ENVFLEET_MUJOCO_MODELS) + "/" + file + ".xml";
    check_plugin_env(std::string("mujoco/") + name, {{"model_path", path}});
  }
}

void models_that_cannot_be_loaded() {
  bool has_thrown = false;
  try {
    check_plugin_env("mujoco/Ant-v5", {{"model_path", std::string("/nowhere/ant.xml")}});
  } catch (const std::exception&) {
    has_thrown = true;
  }
  CHECK(has_thrown);
}

}  // namespace
}  // namespace envfleet::test

int main(int argc, char** argv) {
  using namespace envfleet::test;
  return run_tests({{{"MuJoCo: the same rows on any number of threads", mujoco_envs},
                     {"MuJoCo: a model that is not there", models_that_cannot_be_loaded}}},
                   argc, argv);
}
