// Runs the tests of the C++ core.
#include "tests/runner.h"

int main(int argc, char** argv) {
  using namespace envfleet::test;
  return run_tests(
      {gate_tests(), task_queue_tests(), batch_store_tests(), batch_line_tests(), fair_queue_tests(),
       shared_task_queues_tests(), imaging_tests(), instruction_tests(), kill_tests(), native_parts_tests(),
       episode_tests(), native_pool_tests(), native_pool_end_tests(), allocation_tests()},
      argc, argv);
}
