// SharedTaskQueues, for the process pool: checks arguments, and drops the GIL while it waits.
#include "engine/shared_task_queues.h"

#include <unistd.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/named_tuple.h"
#include "bind/python.h"

namespace envfleet {
namespace {

const NamedTuple* full_batch_type = nullptr;
const NamedTuple* task_type = nullptr;
const NamedTuple* place_type = nullptr;
const NamedTuple* doing_type = nullptr;
const NamedTuple* exit_type = nullptr;

/// A SharedTaskQueues together with the Python objects whose memory it uses.
class PySharedTaskQueues {
 public:
  PySharedTaskQueues(nb::object memory, std::uint32_t num_envs, std::uint32_t num_children, std::uint32_t batch_size,
                     std::vector<std::shared_ptr<PyBatchStore>> stores)
      : stores_(std::move(stores)) {
    const TaskQueuesShape shape{num_envs, num_children, batch_size};
    if (num_children < 1 || num_children > num_envs || num_children >= BatchLine::kMaxWriters) {
      throw nb::value_error("task queues are for between 1 and num_envs children, and fewer than 4096");
    }
    if (PyObject_GetBuffer(memory.ptr(), &buffer_, PyBUF_WRITABLE) != 0) throw nb::python_error();
    if (static_cast<std::size_t>(buffer_.len) < SharedTaskQueues::bytes(shape)) {
      PyBuffer_Release(&buffer_);
      throw nb::value_error("the memory is smaller than SharedTaskQueues.required_bytes()");
    }
    std::vector<std::shared_ptr<BatchStore>> bare;
    for (std::size_t i = 0; i < stores_.size(); ++i) {
      bare.push_back(stores_[i]->store);
      if (bare[i]->layout().num_rows != (i == 0 ? num_envs : batch_size)) {
        PyBuffer_Release(&buffer_);
        throw nb::value_error("line 0 needs batches of num_envs rows, line 1 of batch_size");
      }
    }
    task_queues_ = std::make_unique<SharedTaskQueues>(static_cast<std::byte*>(buffer_.buf), shape, std::move(bare));
  }
  PySharedTaskQueues(const PySharedTaskQueues&) = delete;
  PySharedTaskQueues& operator=(const PySharedTaskQueues&) = delete;
  ~PySharedTaskQueues() { PyBuffer_Release(&buffer_); }

  SharedTaskQueues& task_queues() { return *task_queues_; }

  /// Give each of `env_ids` a task of the same kind.
  void send(nb::handle env_ids, Op op, Line line) {
    const auto [ids, num_tasks] = env_vector(env_ids);
    require_line(line);
    ops_.assign(num_tasks, op);
    task_queues_->send(ids, ops_.data(), num_tasks, line);
  }

  /// Reset `env_ids`, while all other envs repeat their observation.
  void send_reset_of_some(nb::handle env_ids) {
    const auto [ids, num_ids] = env_vector(env_ids);
    ops_.assign(task_queues_->shape().num_envs, Op::kRepeat);
    for (std::size_t i = 0; i < num_ids; ++i) ops_[static_cast<std::size_t>(ids[i])] = Op::kReset;
    all_env_ids_.resize(ops_.size());
    std::iota(all_env_ids_.begin(), all_env_ids_.end(), 0);
    task_queues_->send(all_env_ids_.data(), ops_.data(), ops_.size(), kFull);
  }

  Waiting wait_full(Line line, double timeout_s) {
    require_line(line);
    if (const auto outcome = task_queues_->poll_full(line)) return *outcome;
    Unlocked unlocked;
    return task_queues_->wait_full(line, deadline_in(timeout_s));
  }

  Waiting wait_replies(std::uint32_t child, std::uint32_t num_replies, double timeout_s) {
    Unlocked unlocked;
    return task_queues_->wait_replies(child, num_replies, deadline_in(timeout_s));
  }

  /// The oldest batch, which is full: the flags of all its rows, and its arrays.
  nb::object take(Line line) {
    require_line(line);
    if (!task_queues_->line(line).is_full()) throw nb::value_error("take() needs a full batch: wait_full() first");
    const BatchLine::Full full = task_queues_->take(line);
    return (*full_batch_type)(full.flags,
                              stores_[line]->arrays(full.buffer, make_lease(task_queues_->store(line), full.buffer)));
  }

  /// The next task, or None after `timeout_s`.
  nb::object next_task(double timeout_s) {
    std::optional<Task> task = task_queues_->try_next_task();
    if (!task) {
      {
        Unlocked unlocked;
        task_queues_->wait_for_task(deadline_in(timeout_s));
      }
      task = task_queues_->try_next_task();
    }
    if (!task) return nb::none();
    return (*task_type)(task->op, task->env_id, static_cast<Line>(task->line));
  }

  /// Take a row for the env's result.
  nb::object claim(std::int32_t env_id, Line line) {
    require_line(line);
    place_ = task_queues_->claim(env_id, line);
    line_ = line;
    return (*place_type)(place_.buffer, place_.row);
  }

  /// Publish the row claimed last.
  void complete(std::int32_t env_id, double reward, bool terminated, bool truncated, std::uint8_t flags) {
    task_queues_->complete(line_, place_, {env_id, reward, terminated, truncated, flags});
  }

  /// The children that died since the last call.
  nb::list take_exits() {
    nb::list exits;
    for (const auto& [child, status] : task_queues_->take_exits()) exits.append((*exit_type)(child, status));
    return exits;
  }

  nb::object doing(std::uint32_t child) const {
    const Doing doing = task_queues_->doing(child);
    return (*doing_type)(doing.env_id < 0 ? nb::none() : nb::cast(doing.env_id), doing.op, doing.for_s);
  }

 private:
  std::pair<const std::int32_t*, std::size_t> env_vector(nb::handle env_ids) const {
    const auto [ids, num_ids] = int32_vector(env_ids, "env_ids");
    for (std::size_t i = 0; i < num_ids; ++i) {
      if (ids[i] < 0 || static_cast<std::uint32_t>(ids[i]) >= task_queues_->shape().num_envs) {
        throw nb::value_error(("env_ids has " + std::to_string(ids[i]) + ", which is no env").c_str());
      }
    }
    return {ids, num_ids};
  }

  void require_line(Line line) const {
    if (line >= stores_.size()) throw nb::index_error("this pool has no such line of batches");
  }

  std::vector<std::shared_ptr<PyBatchStore>> stores_;
  Py_buffer buffer_{};
  std::unique_ptr<SharedTaskQueues> task_queues_;
  std::vector<Op> ops_;
  std::vector<std::int32_t> all_env_ids_;
  Place place_{};  // a child's row between claim() and complete()
  Line line_ = kFull;
};

}  // namespace

void bind_shared_task_queues(nb::module_& m) {
  full_batch_type = new NamedTuple(m, "envfleet._native.core.FullBatch", {"flags", "arrays"});
  task_type = new NamedTuple(m, "envfleet._native.core.Task", {"op", "env_id", "line"});
  place_type = new NamedTuple(m, "envfleet._native.core.Place", {"buffer", "row"});
  doing_type = new NamedTuple(m, "envfleet._native.core.Doing", {"env_id", "op", "for_s"});
  exit_type = new NamedTuple(m, "envfleet._native.core.Exit", {"child", "status"});
  nb::class_<PySharedTaskQueues>(m, "SharedTaskQueues")
      .def(nb::init<nb::object, std::uint32_t, std::uint32_t, std::uint32_t,
                    std::vector<std::shared_ptr<PyBatchStore>>>(),
           "memory"_a, "num_envs"_a, "num_children"_a, "batch_size"_a, "stores"_a)
      .def_static("required_bytes",
                  [](std::uint32_t num_envs, std::uint32_t num_children, std::uint32_t batch_size) {
                    return SharedTaskQueues::bytes({num_envs, num_children, batch_size});
                  })
      // the parent
      .def("clear", [](PySharedTaskQueues& self) { self.task_queues().clear(); })
      .def(
          "set_seed",
          [](PySharedTaskQueues& self, std::uint32_t env_id, std::optional<std::uint64_t> seed) {
            self.task_queues().set_seed(env_id, seed);
          },
          "env_id"_a, "seed"_a.none())
      .def("send", &PySharedTaskQueues::send, "env_ids"_a, "op"_a, "line"_a)
      .def("send_reset_of_some", &PySharedTaskQueues::send_reset_of_some, "env_ids"_a)
      .def("wait_full", &PySharedTaskQueues::wait_full, "line"_a, "timeout_s"_a)
      .def("take", &PySharedTaskQueues::take, "line"_a)
      .def("busy_env_ids", [](PySharedTaskQueues& self) { return self.task_queues().busy_env_ids(); })
      .def("next_failed_env", [](PySharedTaskQueues& self) { return self.task_queues().next_failed_env(); })
      .def("abandon", [](PySharedTaskQueues& self) { self.task_queues().abandon(); })
      .def("post_request",
           [](PySharedTaskQueues& self, std::uint32_t child) { self.task_queues().post_request(child); })
      .def("post_stop", [](PySharedTaskQueues& self, std::uint32_t child) { self.task_queues().post_stop(child); })
      .def("wait_replies", &PySharedTaskQueues::wait_replies, "child"_a, "num_replies"_a, "timeout_s"_a)
      .def("let_parent_spin",
           [](PySharedTaskQueues& self, bool may_spin) { self.task_queues().let_parent_spin(may_spin); })
      .def("take_exits", &PySharedTaskQueues::take_exits)
      .def("recover", [](PySharedTaskQueues& self, std::uint32_t child) { return self.task_queues().recover(child); })
      .def("doing", &PySharedTaskQueues::doing)
      .def("pid",
           [](PySharedTaskQueues& self, std::uint32_t child) -> std::optional<std::int32_t> {
             const std::int32_t pid = self.task_queues().pid(child);
             if (pid == 0) return std::nullopt;  // not started yet
             return pid;
           })
      .def("first_env",
           [](PySharedTaskQueues& self, std::uint32_t child) { return self.task_queues().first_env(child); })
      .def("child_of",
           [](PySharedTaskQueues& self, std::uint32_t env_id) { return self.task_queues().child_of(env_id); })
      // whoever reaps the children
      .def("report_exit", [](PySharedTaskQueues& self, std::uint32_t child,
                             int status) { self.task_queues().report_exit(child, status); })
      // a child
      .def("start_child",
           [](PySharedTaskQueues& self, std::uint32_t child) { self.task_queues().start_child(child, getpid()); })
      .def("next_task", &PySharedTaskQueues::next_task, "timeout_s"_a)
      .def("seed", [](PySharedTaskQueues& self, std::uint32_t env_id) { return self.task_queues().seed(env_id); })
      .def("claim", &PySharedTaskQueues::claim, "env_id"_a, "line"_a)
      .def("complete", &PySharedTaskQueues::complete, "env_id"_a, "reward"_a, "terminated"_a, "truncated"_a, "flags"_a)
      .def("reply", [](PySharedTaskQueues& self) { self.task_queues().reply(); })
      .def("num_failures", [](PySharedTaskQueues& self,
                              std::uint32_t env_id) { return self.task_queues().num_failures(env_id).load(); })
      .def("add_failure", [](PySharedTaskQueues& self,
                             std::uint32_t env_id) { return self.task_queues().num_failures(env_id).fetch_add(1) + 1; })
      .def("forgive_failures",
           [](PySharedTaskQueues& self, std::uint32_t env_id) { self.task_queues().num_failures(env_id).store(0); });
}

}  // namespace envfleet
