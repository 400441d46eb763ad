// BatchLayout: which arrays a batch has, in which order, and where they lie in its buffer. Python asks for them by
// name (bind/arrays.h); nothing else knows their order.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace envfleet {

/// Where one array of a batch lies: `num_rows` rows of `row_bytes`, from `offset` in its buffer.
struct Field {
  std::size_t offset;
  std::size_t row_bytes;
};

/// The arrays every batch has. RowLayout says what follows them.
enum FixedField : std::size_t {
  kEnvIds = 0,      // int32
  kRewards = 1,     // float64
  kTerminated = 2,  // bool
  kTruncated = 3,   // bool
  kRowFlags = 4,    // uint8, see RowFlag
  kNumFixedFields = 5,
};
inline constexpr std::size_t kFixedRowBytes[kNumFixedFields] = {sizeof(std::int32_t), sizeof(double), 1, 1, 1};

/// The order of the other arrays: obs, final obs, infos, final infos. Batches have final ones if the mode may be
/// same-step autoreset. An info has two arrays: its values, and the mask of the rows that have it.
struct RowLayout {
  std::size_t num_obs;
  std::size_t num_infos;
  bool has_final;

  std::size_t obs() const { return kNumFixedFields; }
  std::size_t final_obs() const { return obs() + num_obs; }
  std::size_t infos() const { return obs() + (has_final ? 2 : 1) * num_obs; }
  std::size_t final_infos() const { return infos() + 2 * num_infos; }
  std::size_t num_fields() const { return infos() + (has_final ? 4 : 2) * num_infos; }

  /// The bytes of one row of each array, given those of an observation's leaves and of infos.
  std::vector<std::size_t> row_bytes(const std::vector<std::size_t>& obs_bytes,
                                     const std::vector<std::size_t>& info_bytes) const {
    std::vector<std::size_t> all(kFixedRowBytes, kFixedRowBytes + kNumFixedFields);
    for (int i = 0; i < (has_final ? 2 : 1); ++i) all.insert(all.end(), obs_bytes.begin(), obs_bytes.end());
    for (int i = 0; i < (has_final ? 2 : 1); ++i) {
      for (const std::size_t bytes : info_bytes) all.insert(all.end(), {bytes, 1});
    }
    return all;
  }
};

struct BatchLayout {
  std::uint32_t num_rows;
  std::size_t buffer_bytes;  // a multiple of the page size
  std::vector<Field> fields;
};

/// Arrays one behind the other. Each begins on a cache line of its own.
inline BatchLayout lay_out(std::uint32_t num_rows, const std::vector<std::size_t>& row_bytes) {
  constexpr std::size_t kCacheLine = 64;
  BatchLayout layout{num_rows, 0, {}};
  for (const std::size_t bytes : row_bytes) {
    layout.fields.push_back({layout.buffer_bytes, bytes});
    layout.buffer_bytes = (layout.buffer_bytes + num_rows * bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  }
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  layout.buffer_bytes = (layout.buffer_bytes + page_bytes - 1) / page_bytes * page_bytes;
  return layout;
}

}  // namespace envfleet
