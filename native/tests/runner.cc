// Runs tests; an argument chooses those whose name contains it.
#include "tests/runner.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <vector>

namespace envfleet::test {
namespace {

constexpr int kMaxReports = 10;        // of one test: a broken loop fails a million times
constexpr unsigned kTestTime_s = 150;  // for one test; all waits inside are shorter

// In shared memory, so that forked processes count here too.
std::atomic<int>* failed_checks = nullptr;
bool is_skipped = false;
const char* running = "";

void give_up(int) {
  const char text[] = "a test hangs: ";
  [[maybe_unused]] auto written = write(STDERR_FILENO, text, sizeof(text) - 1);
  written = write(STDERR_FILENO, running, strlen(running));
  written = write(STDERR_FILENO, "\n", 1);
  _exit(3);
}

bool passes(const Test& test) {
  failed_checks->store(0);
  is_skipped = false;
  running = test.name;
  const auto started = Clock::now();
  alarm(kTestTime_s);
  try {
    test.run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "in \"%s\": %s\n", test.name, error.what());
    failed_checks->fetch_add(1);
  }
  alarm(0);
  const double took_s = std::chrono::duration<double>(Clock::now() - started).count();
  const bool has_passed = failed_checks->load() == 0;
  std::printf("%-8s %6.2f s  %s\n", !has_passed ? "FAILED" : is_skipped ? "skipped" : "passed", took_s, test.name);
  return has_passed;
}

}  // namespace

void check_failed(const char* file, int line, const char* condition) {
  if (failed_checks->fetch_add(1) < kMaxReports) {
    std::fprintf(stderr, "%s:%d: in \"%s\": %s\n", file, line, running, condition);
  }
}

int num_failed_checks() { return failed_checks->load(); }

void skip(const char* reason) {
  is_skipped = true;
  std::printf("skipped: %s\n", reason);
}

int run_tests(const std::vector<std::vector<Test>>& suites, int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);  // or a fork would print the buffer again
  void* shared = mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  failed_checks = new (shared) std::atomic<int>(0);
  signal(SIGALRM, give_up);

  int num_passed = 0, num_failed = 0, num_skipped = 0;
  for (const auto& suite : suites) {
    for (const Test& test : suite) {
      if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
      if (!passes(test)) {
        ++num_failed;
      } else if (is_skipped) {
        ++num_skipped;
      } else {
        ++num_passed;
      }
    }
  }
  if (num_skipped > 0) std::printf("%d skipped\n", num_skipped);
  std::printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 && num_passed > 0 ? 0 : 1;
}

}  // namespace envfleet::test
