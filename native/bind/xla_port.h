// XlaPort: the way by which jitted functions of JAX step a native pool, without Python in the usual case.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "bind/action_leaf.h"
#include "bind/python.h"
#include "bind/xla_frame.h"
#include "engine/flight.h"
#include "engine/native_pool.h"

namespace envfleet {

/// One for each pool whose xla() was called. XLA calls from a thread of its own choice, and knows the port by its id,
/// so that a call after the pool's end finds nothing instead of freed memory.
///
/// The lock gives the pool to one call at a time, of XLA or of Python. Whoever holds it may wait for the GIL; whoever
/// holds the GIL must let go of it before waiting for the lock.
///
/// What is usual is done here. All else (a wrong action, an env that failed, a wait of more than kPatience) is asked of
/// Python, whose pool has the rules and the words.
class XlaPort {
 public:
  /// Results are the columns of a batch, in the order of its layout; instead of its flags, whether a row has finals.
  /// A caller with room for one more result, int32, is told the steps of each row's episode there.
  struct Column {
    Dtype dtype;
    std::size_t num_elements;  // of a row
  };
  struct Batches {
    Line line;
    RowLayout layout;
    std::vector<Column> columns;
  };

  /// What a port needs of its pool. `ask(action_leaves, env_ids)` sends for us, `ask(None, None)` receives.
  struct Pool {
    std::shared_ptr<NativePool> engine;
    std::vector<ActionLeaf> action_leaves;
    Batches batches;
    std::shared_ptr<Flight> flight;
    double timeout_s;
    nb::object ask;
  };

  /// Open until close().
  static std::shared_ptr<XlaPort> open(Pool pool);
  explicit XlaPort(Pool pool);
  XlaPort(const XlaPort&) = delete;
  XlaPort& operator=(const XlaPort&) = delete;

  std::uint64_t id() const { return id_; }

  // -- Python's side --

  bool acquire(double timeout_s);
  /// `is_plain`: nothing is under way that only Python knows of.
  void release(bool is_plain);
  /// In a fork of the owner, where whoever holds the lock does not exist: leave all calls to Python, which refuses
  /// them.
  void abandon() { is_plain_ = false; }
  /// Has a batch been received here since this was last asked?
  bool take_has_received();
  /// [N] int32: how many steps the episodes of these envs have, none of which may be in flight.
  nb::object episode_steps(nb::handle env_ids);
  /// No call gets in any more. False if one did not end in time: it keeps what it uses.
  bool close(Deadline deadline);

  // -- XLA's side --

  enum class Verb : std::uint8_t { kSend, kRecv, kStep };
  static void answer(Verb verb, const xla::CallFrame& frame);

 private:
  void send(const xla::Buffers& arguments);
  void recv(const xla::Buffers& results);
  bool try_send(const xla::Buffers& arguments, const std::int32_t* env_ids, std::size_t num_rows);
  bool try_recv(const xla::Buffers& results);
  void ask_to_send(const xla::Buffers& arguments, bool is_of_all);
  void ask_to_recv(const xla::Buffers& results);
  nb::object ask(nb::object action_leaves, nb::object env_ids) const;
  void require_form(const xla::Buffers& results) const;
  void copy_batch(const std::byte* memory, const xla::Buffers& results);
  void copy_episode_steps(const std::int32_t* env_ids, std::size_t num_ids, std::int32_t* steps);
  const std::byte* action_rows(std::size_t leaf, const xla::Buffer& buffer, std::size_t num_rows);

  const std::uint64_t id_;
  const std::shared_ptr<NativePool> pool_;
  const std::vector<ActionLeaf> action_leaves_;
  const Batches batches_;
  const double timeout_s_;

  std::recursive_timed_mutex lock_;
  const std::shared_ptr<Flight> flight_;             // guarded by lock_
  bool is_plain_ = false;                            // guarded by lock_
  bool is_closed_ = false;                           // guarded by lock_
  bool has_received_ = false;                        // guarded by lock_
  nb::object ask_;                                   // guarded by lock_ and the GIL
  std::vector<std::vector<std::byte>> action_wide_;  // guarded by lock_; room for actions of another width
  std::vector<std::byte> env_state_;                 // guarded by lock_; room for the state of one env
};

}  // namespace envfleet
