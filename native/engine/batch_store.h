// BatchStore: the memory of batches. A buffer is leased for one batch and given back when its last array dies.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/batch_layout.h"

namespace envfleet {

/// Buffers of one layout. With a file descriptor they lie in that (memory) file, and every process
/// that opens the file finds buffer k at the same offset; with -1 they are private to this process.
///
/// The file grows by doubling, so even a million leased batches take few mappings; pages that no
/// batch has touched take no memory.
class BatchStore {
 public:
  BatchStore(int fd, BatchLayout layout) : layout_(std::move(layout)) {
    if (fd < 0) return;
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "cannot keep the batch file open");
  }
  BatchStore(const BatchStore&) = delete;
  BatchStore& operator=(const BatchStore&) = delete;
  ~BatchStore() {
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      if (chunks_[i] != nullptr) munmap(chunks_[i], chunk_buffers(i) * layout_.buffer_bytes);
    }
    if (fd_ >= 0) close(fd_);
  }

  const BatchLayout& layout() const { return layout_; }

  /// The most recently returned buffer (its cache lines are warm), or a new one. Only the owner leases.
  std::uint32_t lease() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) grow();
    const std::uint32_t buffer = free_.back();
    free_.pop_back();
    return buffer;
  }

  void give_back(std::uint32_t buffer) {
    std::lock_guard lock(mutex_);
    free_.push_back(buffer);
  }

  std::uint32_t num_buffers() {
    std::lock_guard lock(mutex_);
    return num_buffers_;
  }
  std::size_t num_leased() {
    std::lock_guard lock(mutex_);
    return num_buffers_ - free_.size();
  }

  /// The buffer's memory, mapped on first use. The owner must have leased it at some time.
  std::byte* memory(std::uint32_t buffer) {
    const std::size_t chunk = std::bit_width(buffer / kFirstChunkBuffers + 1) - 1;
    if (chunks_[chunk] == nullptr) chunks_[chunk] = map(chunk);
    return chunks_[chunk] + (buffer - chunk_start(chunk)) * layout_.buffer_bytes;
  }

  template <class T>
  T* column(std::byte* buffer_memory, std::size_t field) const {
    return reinterpret_cast<T*>(buffer_memory + layout_.fields[field].offset);
  }

 private:
  static constexpr std::uint32_t kFirstChunkBuffers = 4;
  static std::uint32_t chunk_buffers(std::size_t chunk) { return kFirstChunkBuffers << chunk; }
  static std::uint32_t chunk_start(std::size_t chunk) { return kFirstChunkBuffers * ((1u << chunk) - 1); }

  void grow() {
    const std::size_t chunk = std::bit_width(num_buffers_ / kFirstChunkBuffers + 1) - 1;
    const std::uint32_t end = chunk_start(chunk + 1);
    free_.reserve(end);  // give_back() runs in destructors and must not throw
    if (fd_ >= 0 && ftruncate(fd_, static_cast<off_t>(end * layout_.buffer_bytes)) != 0) {
      throw std::system_error(errno, std::generic_category(), "no memory for more batches");
    }
    for (std::uint32_t buffer = end; buffer-- > num_buffers_;) free_.push_back(buffer);
    num_buffers_ = end;
  }

  std::byte* map(std::size_t chunk) const {
    const std::size_t bytes = chunk_buffers(chunk) * layout_.buffer_bytes;
    const auto offset = static_cast<off_t>(chunk_start(chunk) * layout_.buffer_bytes);
    const int flags = fd_ >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd_, fd_ >= 0 ? offset : 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "cannot map batch memory");
    return static_cast<std::byte*>(memory);
  }

  BatchLayout layout_;
  int fd_ = -1;
  // Chunk i holds kFirstChunkBuffers * 2^i buffers. Threads that share a store find a chunk mapped already: the
  // owner touches a buffer before it hands out rows of it.
  std::array<std::byte*, 28> chunks_{};

  std::mutex mutex_;
  std::vector<std::uint32_t> free_;  // guarded by mutex_
  std::uint32_t num_buffers_ = 0;    // guarded by mutex_
};

}  // namespace envfleet
