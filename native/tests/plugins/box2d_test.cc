// The environments on Box2D: several on several threads, saved and restored.
#include "tests/plugins/plugin_pool.h"
#include "tests/runner.h"

namespace envfleet::test {
namespace {

void lunar_lander() {
  check_plugin_env("box2d/LunarLander", {});
  check_plugin_env("box2d/LunarLander", {{"continuous", true}, {"enable_wind", true}});
}

void bipedal_walker() {
  check_plugin_env("box2d/BipedalWalker", {});
  check_plugin_env("box2d/BipedalWalker", {{"hardcore", true}});
}

}  // namespace
}  // namespace envfleet::test

int main(int argc, char** argv) {
  using namespace envfleet::test;
  return run_tests({{{"Box2D: LunarLander, the same rows on any number of threads", lunar_lander},
                     {"Box2D: BipedalWalker, the same rows on any number of threads", bipedal_walker}}},
                   argc, argv);
}
