// BatchLine: the batches being filled, in order. Writers take rows and complete them without a lock.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "engine/batch_store.h"

namespace envfleet {

/// What a row's flag byte says. A row without kComplete is being written, or nobody has taken it.
enum RowFlag : std::uint8_t {
  kComplete = 1,
  kHasFinal = 2,    // the episode ended in this step and the final observation lies in its own leaves
  kHasObjects = 4,  // info or observations that are no arrays lie in the object channel
  kFailed = 8,      // the env raised and the caller is to hear of it; the report lies in the object channel
};

/// The row that one result goes to.
struct Place {
  std::uint64_t batch;  // counts the batches of the line
  std::uint32_t buffer;
  std::uint32_t row;
};

struct RowResult {
  std::int32_t env_id = 0;
  double reward = 0.0;
  bool terminated = false;
  bool truncated = false;
  std::uint8_t flags = 0;
};

/// A line hands out rows in one of two ways. If a batch has a row for each env, row i belongs to env
/// i. If batches are smaller, the first to finish takes the next row ("claims a ticket").
///
/// Writers may be processes, and a process may be killed between any two instructions. Nothing may
/// then be lost or waited for in vain, so that the owner can tell for each row who took it:
///  - the word that hands out tickets also names who took the last one, and whoever takes the next
///    writes that down first (`record_owner`), on behalf of one that may no longer live;
///  - a row counts as done by its own flag byte. `num_complete` tells when it is worth looking at the
///    flags, and who opens the gate. As long as it is exact it saves the look; it is not
///    - if a writer was killed between the two: it is short (see `writer_died`);
///    - if a batch was taken or abandoned by its flags while a writer slept between the two: that
///      writer adds its row to whichever batch has the same place in the ring when it wakes up.
class BatchLine {
 public:
  static constexpr std::uint32_t kMaxWriters = 1u << 12;

  static std::uint32_t ring_batches(std::uint32_t num_envs, std::uint32_t batch_size) {
    return std::bit_ceil(num_envs / batch_size + 3);
  }
  static std::size_t bytes(std::uint32_t num_envs, std::uint32_t batch_size) {
    const std::size_t batches = ring_batches(num_envs, batch_size);
    return sizeof(Head) + batches * sizeof(Open) + batches * batch_size * sizeof(std::atomic<std::uint64_t>);
  }

  /// A view of the line at `memory`; the owner calls `clear` once before the first use.
  BatchLine(std::byte* memory, std::uint32_t num_envs, BatchStore* store)
      : store_(store),
        batch_size_(store->layout().num_rows),
        row_is_env_(batch_size_ == num_envs),
        ring_(ring_batches(num_envs, batch_size_)),
        head_(reinterpret_cast<Head*>(memory)),
        open_(reinterpret_cast<Open*>(memory + sizeof(Head))),
        owners_(reinterpret_cast<std::atomic<std::uint64_t>*>(memory + sizeof(Head) + ring_ * sizeof(Open))) {}

  void clear() {
    new (head_) Head();
    for (std::uint32_t i = 0; i < ring_; ++i) new (&open_[i]) Open();
    for (std::uint64_t i = 0; i < std::uint64_t{ring_} * batch_size_; ++i) {
      new (&owners_[i]) std::atomic<std::uint64_t>(0);
    }
  }

  BatchStore& store() const { return *store_; }
  std::uint32_t batch_size() const { return batch_size_; }
  bool row_is_env() const { return row_is_env_; }

  // -- the owner's side: one thread --

  /// Rows for which tasks were sent. The owner opens batches before it sends, so that a writer always
  /// finds one.
  void open_for(std::uint32_t num_tasks) {
    const std::uint64_t num_sent = head_->num_sent + num_tasks;
    while (head_->num_opened * batch_size_ < num_sent) {
      Open& open = open_[head_->num_opened % ring_];
      open.buffer = store_->lease();
      std::byte* memory = store_->memory(open.buffer);
      std::memset(store_->column<std::uint8_t>(memory, kRowFlags), 0, batch_size_);
      open.num_complete.store(0, std::memory_order_relaxed);
      open.flags.store(0, std::memory_order_relaxed);
      ++head_->num_opened;
    }
    head_->num_sent = num_sent;  // last: if there is no memory for a batch, nothing was sent
  }

  std::uint64_t num_in_flight() const { return head_->num_sent - head_->num_received * batch_size_; }

  /// Is the oldest batch full?
  bool is_full() const {
    if (head_->num_received == head_->num_opened) return false;
    const Open& open = open_[head_->num_received % ring_];
    if (open.num_complete.load(std::memory_order_acquire) < batch_size_) return false;
    if (counts_are_exact_) return true;
    const auto* flags = store_->column<std::uint8_t>(store_->memory(open.buffer), kRowFlags);
    for (std::uint32_t row = 0; row < batch_size_; ++row) {
      if (!(load_flags(flags + row) & kComplete)) return false;
    }
    return true;
  }

  /// Call `visit(flags, env_id)` for each row that is complete and not yet received.
  template <class Visit>
  void visit_complete_rows(Visit&& visit) const {
    for (std::uint64_t batch = head_->num_received; batch < head_->num_opened; ++batch) {
      std::byte* memory = store_->memory(open_[batch % ring_].buffer);
      for (std::uint32_t row = 0; row < batch_size_; ++row) {
        const std::uint8_t flags = load_flags(store_->column<std::uint8_t>(memory, kRowFlags) + row);
        if (flags & kComplete) visit(flags, store_->column<std::int32_t>(memory, kEnvIds)[row]);
      }
    }
  }

  struct Full {
    std::uint32_t buffer;
    std::uint8_t flags;  // of all rows
  };

  /// The oldest batch, which is full.
  Full oldest() const {
    const Open& open = open_[head_->num_received % ring_];
    return {open.buffer, static_cast<std::uint8_t>(open.flags.load(std::memory_order_relaxed))};
  }

  /// Take the oldest batch, which is full. Its buffer stays leased.
  Full take() {
    const Full full = oldest();
    ++head_->num_received;
    return full;
  }

  /// Forget all rows sent, and give their buffers back. Each row for which a task was sent is complete.
  void abandon() {
    counts_are_exact_ = false;
    forget();
  }

  /// The same where each such row is counted as well.
  void forget() {
    for (; head_->num_received < head_->num_opened; ++head_->num_received) {
      store_->give_back(open_[head_->num_received % ring_].buffer);
    }
    head_->num_sent = head_->num_opened * batch_size_;
    head_->last_claim.store(pack(head_->num_sent, 0), std::memory_order_release);
  }

  // -- the writers' side: any number of threads or processes --

  Place claim(std::int32_t env_id, std::uint32_t writer) {
    if (row_is_env_) return place(head_->num_opened - 1, static_cast<std::uint32_t>(env_id));
    std::uint64_t last = head_->last_claim.load(std::memory_order_acquire);
    for (;;) {
      const std::uint64_t ticket = last >> kWriterBits;
      if (ticket > 0) record_owner(ticket - 1, last & (kMaxWriters - 1));
      if (head_->last_claim.compare_exchange_weak(last, pack(ticket + 1, writer), std::memory_order_acq_rel)) {
        return place(ticket / batch_size_, static_cast<std::uint32_t>(ticket % batch_size_));
      }
    }
  }

  /// Publish a row whose arrays are written. True if its batch may be full now: the owner is to look at it.
  bool complete(const Place& place, const RowResult& result) {
    std::byte* memory = store_->memory(place.buffer);
    store_->column<std::int32_t>(memory, kEnvIds)[place.row] = result.env_id;
    store_->column<double>(memory, kRewards)[place.row] = result.reward;
    store_->column<std::uint8_t>(memory, kTerminated)[place.row] = result.terminated;
    store_->column<std::uint8_t>(memory, kTruncated)[place.row] = result.truncated;
    Open& open = open_[place.batch % ring_];
    if (result.flags != 0) open.flags.fetch_or(result.flags, std::memory_order_relaxed);
    const std::uint8_t flags = result.flags | kComplete;
    std::atomic_ref(store_->column<std::uint8_t>(memory, kRowFlags)[place.row]).store(flags, std::memory_order_release);
    return open.num_complete.fetch_add(1, std::memory_order_acq_rel) + 1 >= batch_size_;
  }

  // The same in two halves, for writers that are threads and so cannot be killed alone.

  /// The columns that every batch has, of one buffer.
  struct FixedColumns {
    void write(std::uint32_t row, const RowResult& result) const {
      env_ids[row] = result.env_id;
      rewards[row] = result.reward;
      terminated[row] = result.terminated;
      truncated[row] = result.truncated;
      flags[row] = result.flags | kComplete;
    }

    std::int32_t* env_ids;
    double* rewards;
    std::uint8_t* terminated;
    std::uint8_t* truncated;
    std::uint8_t* flags;
  };
  FixedColumns fixed_columns(std::byte* memory) const {
    return {store_->column<std::int32_t>(memory, kEnvIds), store_->column<double>(memory, kRewards),
            store_->column<std::uint8_t>(memory, kTerminated), store_->column<std::uint8_t>(memory, kTruncated),
            store_->column<std::uint8_t>(memory, kRowFlags)};
  }

  /// Publish `num_rows` rows that were written to one batch. True if that batch is full now.
  bool publish(std::uint64_t batch, std::uint32_t num_rows, std::uint8_t flags) {
    Open& open = open_[batch % ring_];
    if (flags != 0) open.flags.fetch_or(flags, std::memory_order_relaxed);
    return open.num_complete.fetch_add(num_rows, std::memory_order_acq_rel) + num_rows >= batch_size_;
  }

  /// Rows that are complete and not yet received; exact unless a writer died.
  std::uint64_t num_complete() const {
    std::uint64_t rows = 0;
    for (std::uint64_t batch = head_->num_received; batch < head_->num_opened; ++batch) {
      rows += open_[batch % ring_].num_complete.load(std::memory_order_acquire);
    }
    return rows;
  }

  // -- after a writer died; the owner's thread --

  /// It may have completed a row that it did not count. From now on every further row of the open
  /// batches opens the gate, and is_full() looks at the flags.
  void writer_died() {
    counts_are_exact_ = false;
    for (std::uint64_t batch = head_->num_received; batch < head_->num_opened; ++batch) {
      open_[batch % ring_].num_complete.fetch_or(kMaybeShort, std::memory_order_acq_rel);
    }
  }

  /// Call `visit(place, is_complete, env_id)` for each open row that `writer` took, or, where rows
  /// belong to envs, for the rows of `env_ids`.
  template <class Visit>
  void rows_of(std::uint32_t writer, std::vector<std::int32_t> env_ids, Visit&& visit) {
    if (row_is_env_) {
      if (head_->num_received == head_->num_opened) return;
      for (std::int32_t env_id : env_ids) {
        visit_row(place(head_->num_opened - 1, static_cast<std::uint32_t>(env_id)), visit);
      }
      return;
    }
    const std::uint64_t last = head_->last_claim.load(std::memory_order_acquire);
    const std::uint64_t num_claimed = last >> kWriterBits;
    if (num_claimed > 0) record_owner(num_claimed - 1, last & (kMaxWriters - 1));
    for (std::uint64_t ticket = head_->num_received * batch_size_; ticket < num_claimed; ++ticket) {
      if (owner_cell(ticket).load(std::memory_order_acquire) != pack(ticket + 1, writer)) continue;
      visit_row(place(ticket / batch_size_, static_cast<std::uint32_t>(ticket % batch_size_)), visit);
    }
  }

 private:
  static constexpr std::uint32_t kMaybeShort = 1u << 31;  // makes num_complete greater than any batch_size
  static constexpr int kWriterBits = 12;  // leaves 52 bits for tickets: four years at 30 million rows a second
  static std::uint64_t pack(std::uint64_t num_claimed, std::uint64_t writer) {
    return num_claimed << kWriterBits | writer;
  }

  struct Head {
    std::uint64_t num_sent{0};                             // the owner's
    std::uint64_t num_opened{0};                           // the owner's; read by writers after a task from it
    std::uint64_t num_received{0};                         // the owner's
    alignas(64) std::atomic<std::uint64_t> last_claim{0};  // number of tickets claimed, and by whom the last
  };
  struct alignas(64) Open {
    std::atomic<std::uint32_t> num_complete{0};  // or-ed with kMaybeShort
    std::atomic<std::uint32_t> flags{0};         // of all rows, or-ed
    std::uint32_t buffer{0};
  };

  static std::uint8_t load_flags(const std::uint8_t* flags) {
    return std::atomic_ref(*const_cast<std::uint8_t*>(flags)).load(std::memory_order_acquire);
  }

  Place place(std::uint64_t batch, std::uint32_t row) const { return {batch, open_[batch % ring_].buffer, row}; }

  std::atomic<std::uint64_t>& owner_cell(std::uint64_t ticket) const {
    return owners_[ticket % (std::uint64_t{ring_} * batch_size_)];
  }

  // Cells only move forward: a writer that slept since it read the last claim must not undo a later record.
  void record_owner(std::uint64_t ticket, std::uint64_t writer) {
    const std::uint64_t record = pack(ticket + 1, writer);
    std::atomic<std::uint64_t>& cell = owner_cell(ticket);
    std::uint64_t seen = cell.load(std::memory_order_relaxed);
    while (seen < record && !cell.compare_exchange_weak(seen, record, std::memory_order_acq_rel)) {
    }
  }

  template <class Visit>
  void visit_row(const Place& place, Visit& visit) {
    std::byte* memory = store_->memory(place.buffer);
    const bool is_complete = load_flags(store_->column<std::uint8_t>(memory, kRowFlags) + place.row) & kComplete;
    visit(place, is_complete, store_->column<std::int32_t>(memory, kEnvIds)[place.row]);
  }

  BatchStore* store_;
  std::uint32_t batch_size_;
  bool row_is_env_;
  std::uint32_t ring_;
  Head* head_;
  Open* open_;
  std::atomic<std::uint64_t>* owners_;
  bool counts_are_exact_ = true;  // the owner's
};

}  // namespace envfleet
