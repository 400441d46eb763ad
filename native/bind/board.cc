// Board, for the process pool: checks arguments, and drops the GIL while it waits.
#include "engine/board.h"

#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/python.h"

namespace envfleet {
namespace {

/// A Board together with the Python objects whose memory it uses.
class PyBoard {
 public:
  PyBoard(nb::object memory, std::uint32_t num_envs, std::uint32_t num_children, std::uint32_t batch_size,
          std::vector<std::shared_ptr<PyBatchStore>> stores)
      : stores_(std::move(stores)) {
    const BoardShape shape{num_envs, num_children, batch_size};
    if (num_children < 1 || num_children > num_envs || num_children >= BatchLine::kMaxWriters) {
      throw nb::value_error("a board has between 1 and num_envs children, and fewer than 4096");
    }
    if (PyObject_GetBuffer(memory.ptr(), &buffer_, PyBUF_WRITABLE) != 0) throw nb::python_error();
    if (static_cast<std::size_t>(buffer_.len) < Board::bytes(shape)) {
      PyBuffer_Release(&buffer_);
      throw nb::value_error("the memory is smaller than Board.required_bytes()");
    }
    std::vector<std::shared_ptr<BatchStore>> bare;
    for (std::size_t i = 0; i < stores_.size(); ++i) {
      bare.push_back(stores_[i]->store);
      if (bare[i]->layout().num_rows != (i == 0 ? num_envs : batch_size)) {
        PyBuffer_Release(&buffer_);
        throw nb::value_error("line 0 needs batches of num_envs rows, line 1 of batch_size");
      }
    }
    board_ = std::make_unique<Board>(static_cast<std::byte*>(buffer_.buf), shape, std::move(bare));
  }
  PyBoard(const PyBoard&) = delete;
  PyBoard& operator=(const PyBoard&) = delete;
  ~PyBoard() { PyBuffer_Release(&buffer_); }

  Board& board() { return *board_; }

  void send(nb::handle env_ids, nb::handle ops, std::uint8_t line) {
    const auto [id, num_tasks] = int32_vector(env_ids, "env_ids");
    for (std::size_t i = 0; i < num_tasks; ++i) {
      if (id[i] < 0 || static_cast<std::uint32_t>(id[i]) >= board_->shape().num_envs) {
        throw nb::value_error(("env_ids has " + std::to_string(id[i]) + ", which is no env").c_str());
      }
    }
    if (PyLong_Check(ops.ptr())) {
      ops_.assign(num_tasks, static_cast<Op>(nb::cast<int>(ops)));
    } else {
      ops_.clear();
      for (nb::handle op : ops) ops_.push_back(static_cast<Op>(nb::cast<int>(op)));
      if (ops_.size() != num_tasks) throw nb::value_error("ops must have an entry for each of env_ids");
    }
    require_line(line);
    board_->send(id, ops_.data(), num_tasks, line);
  }

  int wait_full(std::uint8_t line, double timeout_s) {
    require_line(line);
    if (const auto outcome = board_->poll_full(line)) return static_cast<int>(*outcome);
    Unlocked unlocked;
    return static_cast<int>(board_->wait_full(line, deadline_in(timeout_s)));
  }

  int wait_replies(std::uint32_t child, std::uint32_t num_replies, double timeout_s) {
    Unlocked unlocked;
    return static_cast<int>(board_->wait_replies(child, num_replies, deadline_in(timeout_s)));
  }

  nb::tuple take(std::uint8_t line) {
    require_line(line);
    if (!board_->line(line).is_full()) throw nb::value_error("take() needs a full batch: wait_full() first");
    const BatchLine::Full full = board_->take(line);
    return nb::make_tuple(full.flags, stores_[line]->arrays(full.buffer, make_lease(board_->store(line), full.buffer)));
  }

  /// The next task as (op, env_id, line), or None after `timeout_s`.
  nb::object next_task(double timeout_s) {
    std::optional<Task> task = board_->try_next_task();
    if (!task) {
      {
        Unlocked unlocked;
        board_->wait_for_task(deadline_in(timeout_s));
      }
      task = board_->try_next_task();
    }
    if (!task) return nb::none();
    return nb::make_tuple(static_cast<int>(task->op), task->env_id, task->line);
  }

  /// Take a row for the env's result: (buffer, row).
  nb::tuple claim(std::int32_t env_id, std::uint8_t line) {
    require_line(line);
    place_ = board_->claim(env_id, line);
    line_ = line;
    return nb::make_tuple(place_.buffer, place_.row);
  }

  /// Publish the row claimed last.
  void complete(std::int32_t env_id, double reward, bool terminated, bool truncated, std::uint8_t flags) {
    board_->complete(line_, place_, {env_id, reward, terminated, truncated, flags});
  }

 private:
  void require_line(std::uint8_t line) const {
    if (line >= stores_.size()) throw nb::index_error("this board has no such line of batches");
  }

  std::vector<std::shared_ptr<PyBatchStore>> stores_;
  Py_buffer buffer_{};
  std::unique_ptr<Board> board_;
  std::vector<Op> ops_;
  Place place_{};  // a child's row between claim() and complete()
  std::uint8_t line_ = 0;
};

}  // namespace

void bind_board(nb::module_& m) {
  nb::class_<PyBoard>(m, "Board")
      .def(nb::init<nb::object, std::uint32_t, std::uint32_t, std::uint32_t,
                    std::vector<std::shared_ptr<PyBatchStore>>>(),
           "memory"_a, "num_envs"_a, "num_children"_a, "batch_size"_a, "stores"_a)
      .def_static("required_bytes",
                  [](std::uint32_t num_envs, std::uint32_t num_children, std::uint32_t batch_size) {
                    return Board::bytes({num_envs, num_children, batch_size});
                  })
      // the parent
      .def("clear", [](PyBoard& self) { self.board().clear(); })
      .def("clear_child", [](PyBoard& self, std::uint32_t child) { self.board().clear_child(child); })
      .def(
          "set_seed",
          [](PyBoard& self, std::uint32_t env_id, std::optional<std::uint64_t> seed) {
            self.board().set_seed(env_id, seed);
          },
          "env_id"_a, "seed"_a.none())
      .def("send", &PyBoard::send, "env_ids"_a, "ops"_a, "line"_a)
      .def("wait_full", &PyBoard::wait_full, "line"_a, "timeout_s"_a)
      .def("take", &PyBoard::take, "line"_a)
      .def("num_in_flight", [](PyBoard& self, std::uint8_t line) { return self.board().line(line).num_in_flight(); })
      .def("busy_env_ids", [](PyBoard& self) { return self.board().busy_env_ids(); })
      .def("next_failed_env", [](PyBoard& self) { return self.board().next_failed_env(); })
      .def("abandon", [](PyBoard& self) { self.board().abandon(); })
      .def("post_request", [](PyBoard& self, std::uint32_t child) { self.board().post_request(child); })
      .def("post_stop", [](PyBoard& self, std::uint32_t child) { self.board().post_stop(child); })
      .def("wait_replies", &PyBoard::wait_replies, "child"_a, "num_replies"_a, "timeout_s"_a)
      .def("let_parent_spin", [](PyBoard& self, bool may_spin) { self.board().let_parent_spin(may_spin); })
      .def("take_exits", [](PyBoard& self) { return self.board().take_exits(); })
      .def("recover", [](PyBoard& self, std::uint32_t child) { return self.board().recover(child); })
      .def("doing",
           [](PyBoard& self, std::uint32_t child) {
             const Doing doing = self.board().doing(child);
             return nb::make_tuple(doing.env_id, static_cast<int>(doing.op), doing.for_s);
           })
      .def("pid",
           [](PyBoard& self, std::uint32_t child) -> std::optional<std::int32_t> {
             const std::int32_t pid = self.board().pid(child);
             if (pid == 0) return std::nullopt;  // not started yet
             return pid;
           })
      .def("first_env", [](PyBoard& self, std::uint32_t child) { return self.board().first_env(child); })
      .def("child_of", [](PyBoard& self, std::uint32_t env_id) { return self.board().child_of(env_id); })
      // whoever reaps the children
      .def("report_exit",
           [](PyBoard& self, std::uint32_t child, int status) { self.board().report_exit(child, status); })
      // a child
      .def("start_child", [](PyBoard& self, std::uint32_t child) { self.board().start_child(child, getpid()); })
      .def("next_task", &PyBoard::next_task, "timeout_s"_a)
      .def("seed", [](PyBoard& self, std::uint32_t env_id) { return self.board().seed(env_id); })
      .def("claim", &PyBoard::claim, "env_id"_a, "line"_a)
      .def("complete", &PyBoard::complete, "env_id"_a, "reward"_a, "terminated"_a, "truncated"_a, "flags"_a)
      .def("reply", [](PyBoard& self) { self.board().reply(); })
      .def("num_failures", [](PyBoard& self, std::uint32_t env_id) { return self.board().num_failures(env_id).load(); })
      .def("add_failure",
           [](PyBoard& self, std::uint32_t env_id) { return self.board().num_failures(env_id).fetch_add(1) + 1; })
      .def("forgive_failures", [](PyBoard& self, std::uint32_t env_id) { self.board().num_failures(env_id).store(0); });

  m.attr("STEP") = static_cast<int>(Op::kStep);
  m.attr("RESET") = static_cast<int>(Op::kReset);
  m.attr("REPEAT") = static_cast<int>(Op::kRepeat);
  m.attr("REQUEST") = static_cast<int>(Op::kRequest);
  m.attr("STOP") = static_cast<int>(Op::kStop);
  m.attr("READY") = static_cast<int>(Waiting::kReady);
  m.attr("NEWS") = static_cast<int>(Waiting::kNews);
  m.attr("TIMED_OUT") = static_cast<int>(Waiting::kTimedOut);
  m.attr("HAS_FINAL") = static_cast<int>(kHasFinal);
  m.attr("HAS_OBJECTS") = static_cast<int>(kHasObjects);
  m.attr("FAILED") = static_cast<int>(kFailed);
}

}  // namespace envfleet
