// Memory and processes of tests; both go away with their owner.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "engine/batch_store.h"
#include "tests/check.h"

namespace envfleet::test {

/// Zeroed memory that forked processes share.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes) : bytes_(bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<std::byte*>(memory);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() { munmap(memory_, bytes_); }

  std::byte* get() const { return memory_; }

 private:
  std::byte* memory_;
  std::size_t bytes_;
};

/// One object in memory that forked processes share.
template <class T>
class Shared {
 public:
  Shared() : memory_(sizeof(T)), object_(new (memory_.get()) T()) {}
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }

 private:
  SharedMemory memory_;
  T* object_;
};

/// An anonymous memory file.
class MemoryFile {
 public:
  explicit MemoryFile(unsigned flags = 0) : fd_(memfd_create("engine-test", MFD_CLOEXEC | flags)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  ~MemoryFile() { close(fd_); }

  int fd() const { return fd_; }

 private:
  int fd_;
};

/// The field that test batches have besides the fixed ones.
inline constexpr std::size_t kObs = kNumFixedFields;

struct Obs {
  std::int64_t env_id;
  std::int64_t seq;
};

inline BatchLayout test_layout(std::uint32_t num_rows) {
  return lay_out(num_rows, RowLayout{1, 0, false}.row_bytes({sizeof(Obs)}, {}));
}

/// A forked process. It must be forked while this process has a single thread.
class Process {
 public:
  template <class Run>
  explicit Process(Run&& run) {
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ < 0) throw std::system_error(errno, std::generic_category(), "fork");
    if (pid_ > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(4);
    run();
    _exit(0);
  }
  Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  Process& operator=(Process&& other) noexcept {
    std::swap(pid_, other.pid_);
    return *this;
  }
  ~Process() {
    kill();
    wait(patience());
  }

  pid_t pid() const { return pid_; }

  /// Until it is reaped its pid cannot belong to anybody else.
  void kill() {
    if (pid_ > 0) ::kill(pid_, SIGKILL);
  }

  /// Its wait status, or nothing at the deadline.
  std::optional<int> wait(Deadline deadline) {
    if (pid_ <= 0) return std::nullopt;
    for (int status = 0;;) {
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return status;
      }
      if (Clock::now() >= deadline) return std::nullopt;
      usleep(50);
    }
  }

 private:
  pid_t pid_ = -1;
};

inline bool was_killed(std::optional<int> status) {
  return status && WIFSIGNALED(*status) && WTERMSIG(*status) == SIGKILL;
}

}  // namespace envfleet::test
