// run_tests: what the main() of a test program calls.
#pragma once

#include <vector>

#include "tests/check.h"

namespace envfleet::test {

/// Run all tests, or those whose name contains the program's argument. Returns the exit status.
int run_tests(const std::vector<std::vector<Test>>& suites, int argc, char** argv);

}  // namespace envfleet::test
