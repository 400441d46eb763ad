// Flight: which envs have a result to come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace envfleet {

class Flight {
 public:
  explicit Flight(std::size_t num_envs) : is_in_flight_(num_envs), last_named_(num_envs) {}

  enum class Problem : std::uint8_t { kNone = 0, kNoSuchEnv = 1, kTwice = 2, kBusy = 3 };

  /// May a task be sent to each of these envs?
  Problem check(const std::int32_t* env_ids, std::size_t num_ids) {
    ++num_checks_;
    bool is_busy = false;
    for (std::size_t i = 0; i < num_ids; ++i) {
      const auto env_id = static_cast<std::uint32_t>(env_ids[i]);
      if (env_id >= is_in_flight_.size()) return Problem::kNoSuchEnv;
      if (last_named_[env_id] == num_checks_) return Problem::kTwice;
      last_named_[env_id] = num_checks_;
      is_busy |= is_in_flight_[env_id] != 0;
    }
    return is_busy ? Problem::kBusy : Problem::kNone;
  }

  void set(const std::int32_t* env_ids, std::size_t num_ids, bool is_in_flight) {
    for (std::size_t i = 0; i < num_ids; ++i) {
      std::uint8_t& flag = is_in_flight_[static_cast<std::size_t>(env_ids[i])];
      num_in_flight_ += static_cast<std::size_t>(is_in_flight) - flag;
      flag = is_in_flight;
    }
  }

  void set_all(bool is_in_flight) {
    is_in_flight_.assign(is_in_flight_.size(), is_in_flight);
    num_in_flight_ = is_in_flight ? is_in_flight_.size() : 0;
  }

  std::size_t num_in_flight() const { return num_in_flight_; }
  const std::vector<std::uint8_t>& is_in_flight() const { return is_in_flight_; }

 private:
  std::vector<std::uint8_t> is_in_flight_;  // [num_envs]
  std::vector<std::uint64_t> last_named_;   // [num_envs] the check that named the env last
  std::uint64_t num_checks_ = 0;
  std::size_t num_in_flight_ = 0;
};

}  // namespace envfleet
