// NativePool: checks arguments, drops the GIL while envs step, hands arrays over.
#include "engine/native_pool.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/action_leaf.h"
#include "bind/arrays.h"
#include "bind/named_tuple.h"
#include "bind/native_model.h"
#include "bind/python.h"
#include "bind/values.h"
#include "bind/xla_port.h"

namespace envfleet {
namespace {

constexpr std::chrono::milliseconds kSignalSlice{100};  // how often a wait lets Python's signal handlers run

const NamedTuple* received_type = nullptr;
const NamedTuple* wrong_value_type = nullptr;
const NamedTuple* failure_type = nullptr;
const NamedTuple* saved_state_type = nullptr;

class PyNativePool {
 public:
  PyNativePool(const PyModel& model, std::vector<std::shared_ptr<PyBatchStore>> stores, Autoreset autoreset,
               std::uint32_t max_episode_steps, std::uint32_t num_threads, std::vector<int> helper_cpus,
               double help_worth_s, nb::object unflatten)
      : stores_(std::move(stores)), unflatten_(std::move(unflatten)) {
    if (num_threads < 1 || num_threads > BatchLine::kMaxWriters)
      throw nb::value_error("between 1 and MOST_THREADS threads");
    const EpisodeRules rules{autoreset, max_episode_steps};
    layout_ = stores_.at(0)->rows();
    require_room(rules.autoreset);
    std::vector<std::shared_ptr<BatchStore>> bare;
    for (const auto& store : stores_) {
      require_layout(model.spec, *store);
      bare.push_back(store->store);
    }
    num_envs_ = bare.at(0)->layout().num_rows;
    std::vector<std::size_t> action_row_bytes;
    for (const Space* leaf : model.spec.action.leaves()) {
      action_leaves_.emplace_back(*leaf);
      action_row_bytes.push_back(bytes_of(leaf->dtype) * leaf->num_elements());
    }
    for (const InfoField& field : model.spec.infos) info_keys_.push_back(keys_of(field.name));
    columns_ = columns_of(model.spec);
    generators_.resize(num_envs_);
    pool_ = std::make_shared<NativePool>(
        model.model->make_envs(num_envs_, rules, layout_), std::move(bare), std::move(action_row_bytes),
        NativePoolConfig{num_threads, std::move(helper_cpus),
                         std::chrono::nanoseconds(static_cast<std::int64_t>(help_worth_s * 1e9))});
  }
  PyNativePool(const PyNativePool&) = delete;
  PyNativePool& operator=(const PyNativePool&) = delete;
  ~PyNativePool() { close(5.0); }

  NativePool& pool() { return *pool_; }

  /// From the next task on. The caller has received everything that it sent.
  void set_autoreset(Autoreset autoreset) {
    require_room(autoreset);
    pool_->envs().set_autoreset(autoreset);
  }

  bool close(double timeout_s) {
    if (is_closed_) return true;
    is_closed_ = true;
    const Deadline deadline = deadline_in(timeout_s);
    bool all_ended = port_ == nullptr || port_->close(deadline);
    {
      Unlocked unlocked;
      all_ended &= pool_->close(deadline);
    }
    if (!all_ended) {
      for (nb::object& generator : generators_) generator.release();  // a thread may still draw from it: never freed
    }
    return all_ended;
  }

  /// From now on jitted functions may step the pool, too. Whoever calls another method must have the port's lock.
  std::shared_ptr<XlaPort> open_xla_port(Line line, std::shared_ptr<Flight> flight, double timeout_s, nb::object ask) {
    require_line(line);
    if (is_closed_ || port_ != nullptr) throw nb::value_error("a pool has one port, while it is open");
    port_ =
        XlaPort::open({pool_, action_leaves_, {line, layout_, columns_}, std::move(flight), timeout_s, std::move(ask)});
    return port_;
  }

  void set_generator(std::uint32_t env_id, nb::object bit_generator, bool is_seeded) {
    require_env(env_id);
    const nb::object capsule = bit_generator.attr("capsule");
    auto* generator = static_cast<bitgen_t*>(PyCapsule_GetPointer(capsule.ptr(), "BitGenerator"));
    if (generator == nullptr) throw nb::python_error();
    pool_->envs().set_generator(env_id, Random(generator, is_seeded));
    generators_[env_id] = std::move(bit_generator);
  }
  nb::object generator(std::uint32_t env_id) const {
    require_env(env_id);
    return generators_[env_id].is_valid() ? generators_[env_id] : nb::none();
  }

  /// Reset all envs, or only those in `env_ids`, while the others repeat their observation. Where batches are of the
  /// first to finish the others may be in flight, perhaps in a reset: `options` are not used then.
  void send_reset(nb::handle env_ids, nb::dict options, Line line) {
    require_line(line);
    if (!env_ids.is_none() && line != kFull) {
      const auto [some_ids, num_some] = env_vector(env_ids);
      return pool_->send(some_ids, num_some, Op::kReset, line);
    }
    pool_->set_options(Kwargs(as_values(options)));
    if (env_ids.is_none()) return pool_->send(nullptr, num_envs_, Op::kReset, line);
    std::vector<Op> ops(num_envs_, Op::kRepeat);
    const auto [ids, num_ids] = env_vector(env_ids);
    for (std::size_t i = 0; i < num_ids; ++i) ops[static_cast<std::size_t>(ids[i])] = Op::kReset;
    pool_->send_all(ops, line);
  }

  /// The rows of `env_ids` repeat their observation: the batch is for the other envs.
  void send_repeat(nb::handle env_ids, Line line) {
    require_line(line);
    const auto [ids, num_ids] = env_vector(env_ids);
    pool_->send(ids, num_ids, Op::kRepeat, line);
  }

  /// Step all envs, or `env_ids`. `leaves` have the right dtype and shape. Returns where the first value is that the
  /// action space does not have, and then sends nothing; None if there is none.
  nb::object send(nb::handle env_ids, nb::list leaves, Line line) {
    require_line(line);
    const bool is_all = env_ids.is_none();
    const auto [ids, num_ids] =
        is_all ? std::pair<const std::int32_t*, std::size_t>{nullptr, num_envs_} : env_vector(env_ids);
    if (leaves.size() != action_leaves_.size()) throw nb::value_error("an array for each leaf of the action");
    for (std::size_t i = 0; i < action_leaves_.size(); ++i) {
      if (!action_leaves_[i].fits(leaves[i], num_ids)) throw nb::type_error("an action of the wrong form");
      if (const auto row = action_leaves_[i].first_wrong_row(leaves[i], num_ids)) return (*wrong_value_type)(i, *row);
    }
    for (std::size_t i = 0; i < action_leaves_.size(); ++i) copy_actions(leaves[i], i, ids, num_ids);
    pool_->send(ids, num_ids, Op::kStep, line);
    return nb::none();
  }

  /// The oldest batch, or None after `timeout_s`. If it has flags, arrays() has what they are about.
  nb::object recv(Line line, double timeout_s) {
    require_line(line);
    const Deadline deadline = deadline_in(timeout_s);
    while (wait(line, deadline) != Waited::kReady) {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (Clock::now() >= deadline) return nb::none();
    }
    const Received batch = take(line);
    return (*received_type)(batch.flags, batch.buffer, column(batch, kEnvIds), obs(batch), column(batch, kRewards),
                            column(batch, kTerminated), column(batch, kTruncated), infos(batch));
  }

  /// All arrays of a batch that was received.
  nb::object arrays(Line line, std::uint32_t buffer, nb::object lease) const {
    require_line(line);
    return stores_[line]->arrays(buffer, lease);
  }

  /// step() of all envs in one call, for the usual case: its five results. None otherwise; is_step_pending() then says
  /// whether the actions were sent (recv() the batch) or need a closer look (nothing was done).
  nb::object try_step(nb::handle actions) {
    is_step_pending_ = false;
    if (action_leaves_.size() != 1 || !action_leaves_[0].fits(actions, num_envs_) ||
        action_leaves_[0].first_wrong_row(actions, num_envs_)) {
      return nb::none();
    }
    copy_actions(actions, 0, nullptr, num_envs_);
    pool_->send(nullptr, num_envs_, Op::kStep, kFull);
    if (wait(kFull, Clock::now() + kSignalSlice) != Waited::kReady || pool_->peek(kFull).flags != 0) {
      is_step_pending_ = true;
      return nb::none();
    }
    const Received batch = take(kFull);
    nb::object result = nb::steal(PyTuple_New(5));
    PyTuple_SET_ITEM(result.ptr(), 0, obs(batch).release().ptr());
    PyTuple_SET_ITEM(result.ptr(), 1, column(batch, kRewards).release().ptr());
    PyTuple_SET_ITEM(result.ptr(), 2, column(batch, kTerminated).release().ptr());
    PyTuple_SET_ITEM(result.ptr(), 3, column(batch, kTruncated).release().ptr());
    PyTuple_SET_ITEM(result.ptr(), 4, infos(batch).release().ptr());
    return result;
  }
  bool is_step_pending() const { return is_step_pending_; }

  bool drain(double timeout_s) {
    const Deadline deadline = deadline_in(timeout_s);
    for (;;) {
      {
        Unlocked unlocked;
        if (pool_->drain(std::min(deadline, Clock::now() + kSignalSlice))) return true;
      }
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (Clock::now() >= deadline) return false;
    }
  }

  /// Infos of a batch that was received, or those of its rows that end an episode in the same step.
  nb::dict infos_of(Line line, std::uint32_t buffer, nb::object lease, bool is_final) {
    require_line(line);
    const Received batch{line, buffer, 0, stores_[line]->store->memory(buffer), std::move(lease)};
    return infos(batch, is_final ? layout_.final_infos() : layout_.infos());
  }

  void reset_into(std::uint32_t env_id, nb::dict options, Line line, std::uint32_t buffer, std::uint32_t row) {
    require_env(env_id);
    require_line(line);
    pool_->envs().reset_into(env_id, Kwargs(as_values(options)), *stores_[line]->store, buffer, row);
  }

  nb::object failure(std::uint32_t env_id) {
    require_env(env_id);
    const EnvFailure& failure = pool_->envs().failure(env_id);
    return (*failure_type)(failure.during, failure.what);
  }

  /// The actions that were sent last: for each leaf the bytes of this env's row.
  nb::list action_bytes(std::uint32_t env_id) {
    require_env(env_id);
    nb::list leaves;
    for (std::size_t i = 0; i < action_leaves_.size(); ++i) {
      const std::size_t row_bytes = pool_->action_fields()[i].row_bytes;
      leaves.append(nb::bytes(pool_->action_column(i) + env_id * row_bytes, row_bytes));
    }
    return leaves;
  }

  nb::object get_state(std::uint32_t env_id) {
    require_env(env_id);
    std::vector<std::byte> state(pool_->envs().state_bytes());
    std::uint32_t num_steps = 0;
    pool_->envs().get_state(env_id, state.data(), &num_steps);
    return (*saved_state_type)(nb::bytes(state.data(), state.size()), num_steps, pool_->envs().has_ended(env_id));
  }

  void set_state(std::uint32_t env_id, nb::bytes state, std::uint32_t num_steps, bool has_ended) {
    require_env(env_id);
    if (state.size() != pool_->envs().state_bytes()) throw nb::value_error("the state of another kind of env");
    pool_->envs().set_state(env_id, static_cast<const std::byte*>(state.data()), num_steps);
    pool_->envs().set_ended(env_id, has_ended);
  }

  void require_env(std::uint32_t env_id) const {
    if (env_id >= num_envs_) throw nb::index_error("this pool has no such env");
  }

 private:
  void require_room(Autoreset autoreset) const {
    if (autoreset == Autoreset::kSameStep && !layout_.has_final)
      throw nb::value_error("the batches have no room for final observations");
  }
  struct Received {
    Line line;
    std::uint32_t buffer;
    std::uint8_t flags;
    std::byte* memory;
    nb::object lease;
  };
  struct InfoKeys {
    std::vector<std::pair<nb::object, nb::object>> path;  // each key, and the key of its mask
  };

  void require_line(Line line) const {
    if (line >= stores_.size()) throw nb::index_error("this pool has no such line of batches");
  }

  std::pair<const std::int32_t*, std::size_t> env_vector(nb::handle env_ids) const {
    const auto [ids, num_ids] = int32_vector(env_ids, "env_ids");
    for (std::size_t i = 0; i < num_ids; ++i) require_env(static_cast<std::uint32_t>(ids[i]));
    return {ids, num_ids};
  }

  /// The arrays of a batch must be those that the envs write.
  void require_layout(const Spec& spec, const PyBatchStore& store) const {
    std::vector<std::size_t> obs_bytes, info_bytes;
    for (const Space* leaf : spec.observation.leaves()) {
      obs_bytes.push_back(bytes_of(leaf->dtype) * leaf->num_elements());
    }
    for (const InfoField& field : spec.infos) {
      info_bytes.push_back(bytes_of(field.dtype));
      for (const std::int64_t dim : field.shape) info_bytes.back() *= static_cast<std::size_t>(dim);
    }
    const RowLayout expected{obs_bytes.size(), info_bytes.size(), layout_.has_final};
    const std::vector<Field>& fields = store.store->layout().fields;
    const auto is_field = [](std::size_t row_bytes, const Field& field) { return row_bytes == field.row_bytes; };
    if (!std::ranges::equal(expected.row_bytes(obs_bytes, info_bytes), fields, is_field)) {
      throw nb::value_error("a batch has other arrays than the envs write");
    }
  }

  /// In the order of RowLayout.
  std::vector<XlaPort::Column> columns_of(const Spec& spec) const {
    std::vector<XlaPort::Column> columns{
        {Dtype::kInt32, 1}, {Dtype::kFloat64, 1}, {Dtype::kBool, 1}, {Dtype::kBool, 1}, {Dtype::kUint8, 1}};
    for (int i = 0; i < (layout_.has_final ? 2 : 1); ++i) {
      for (const Space* leaf : spec.observation.leaves()) columns.push_back({leaf->dtype, leaf->num_elements()});
    }
    for (int i = 0; i < (layout_.has_final ? 2 : 1); ++i) {
      for (const InfoField& field : spec.infos) {
        std::size_t num_elements = 1;
        for (const std::int64_t dim : field.shape) num_elements *= static_cast<std::size_t>(dim);
        columns.insert(columns.end(), {{field.dtype, num_elements}, {Dtype::kBool, 1}});
      }
    }
    return columns;
  }

  static InfoKeys keys_of(const std::string& name) {
    InfoKeys keys;
    for (std::size_t start = 0; start <= name.size();) {
      const std::size_t end = std::min(name.find('/', start), name.size());
      const std::string key = name.substr(start, end - start);
      keys.path.emplace_back(nb::cast(key), nb::cast("_" + key));
      start = end + 1;
    }
    return keys;
  }

  void copy_actions(nb::handle object, std::size_t leaf, const std::int32_t* env_ids, std::size_t num_rows) {
    const auto* rows = static_cast<const std::byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(object.ptr())));
    write_actions(*pool_, leaf, rows, env_ids, num_rows);
  }

  Waited wait(Line line, Deadline deadline) {
    Unlocked unlocked;
    return pool_->recv(line, std::min(deadline, Clock::now() + kSignalSlice));
  }

  Received take(Line line) {
    const BatchLine::Full full = pool_->take(line);
    const std::shared_ptr<BatchStore>& store = stores_[line]->store;
    return {line, full.buffer, full.flags, store->memory(full.buffer), make_lease(store, full.buffer)};
  }

  nb::object column(const Received& batch, std::size_t field) const {
    return stores_[batch.line]->array(field, batch.memory, batch.lease);
  }

  nb::object obs(const Received& batch) const {
    if (unflatten_.is_none()) return column(batch, layout_.obs());
    return unflatten_(stores_[batch.line]->obs(batch.memory, batch.lease));
  }

  nb::dict infos(const Received& batch) const { return infos(batch, layout_.infos()); }

  /// `key` and its mask `_key`, where any row has it: the twin of InfoTable.add in contract/infos/table.py, which has
  /// the rest of the rule. In C++ because a step of all envs returns its infos in the same call.
  nb::dict infos(const Received& batch, std::size_t first_field) const {
    nb::dict all;
    const BatchLayout& layout = stores_[batch.line]->store->layout();
    for (std::size_t i = 0; i < info_keys_.size(); ++i) {
      const std::size_t field = first_field + 2 * i;
      if (std::memchr(batch.memory + layout.fields[field + 1].offset, 1, layout.num_rows) == nullptr) continue;
      const nb::object mask = column(batch, field + 1);
      nb::dict place = all;
      const auto& path = info_keys_[i].path;
      for (std::size_t depth = 0; depth + 1 < path.size(); ++depth) {
        const auto& [key, mask_key] = path[depth];
        if (!place.contains(key)) {
          place[key] = nb::dict();
          place[mask_key] = mask;  // the fields of one dictionary are set together
        }
        place = nb::cast<nb::dict>(place[key]);
      }
      place[path.back().first] = column(batch, field);
      place[path.back().second] = mask;
    }
    return all;
  }

  std::vector<std::shared_ptr<PyBatchStore>> stores_;
  nb::object unflatten_;  // from a tuple of leaves to an observation; None if there is only one
  std::vector<ActionLeaf> action_leaves_;
  std::vector<InfoKeys> info_keys_;
  std::vector<XlaPort::Column> columns_;
  std::vector<nb::object> generators_;  // [num_envs] NumPy bit generators
  RowLayout layout_{};
  std::uint32_t num_envs_ = 0;
  bool is_closed_ = false;
  bool is_step_pending_ = false;
  std::shared_ptr<NativePool> pool_;
  std::shared_ptr<XlaPort> port_;  // null: no jitted function knows the pool
};

}  // namespace

void bind_native_pool(nb::module_& m) {
  received_type = new NamedTuple(m, "envfleet._native.core.Received",
                                 {"flags", "buffer", "env_ids", "obs", "rewards", "terminated", "truncated", "infos"});
  wrong_value_type = new NamedTuple(m, "envfleet._native.core.WrongValue", {"leaf", "row"});
  failure_type = new NamedTuple(m, "envfleet._native.core.EnvFailure", {"during", "what"});
  saved_state_type = new NamedTuple(m, "envfleet._native.core.SavedState", {"state", "num_steps", "has_ended"});
  nb::class_<PyNativePool>(m, "NativePool")
      .def(nb::init<const PyModel&, std::vector<std::shared_ptr<PyBatchStore>>, Autoreset, std::uint32_t, std::uint32_t,
                    std::vector<int>, double, nb::object>(),
           "model"_a, "stores"_a, "autoreset"_a, "max_episode_steps"_a, "num_threads"_a, "helper_cpus"_a,
           "help_worth_s"_a, "unflatten"_a.none())
      .def("set_autoreset", &PyNativePool::set_autoreset, "autoreset"_a)
      .def("try_step", &PyNativePool::try_step)
      .def_prop_ro("is_step_pending", &PyNativePool::is_step_pending)
      .def("send", &PyNativePool::send, "env_ids"_a.none(), "leaves"_a, "line"_a)
      .def("send_reset", &PyNativePool::send_reset, "env_ids"_a.none(), "options"_a, "line"_a)
      .def("send_repeat", &PyNativePool::send_repeat, "env_ids"_a, "line"_a)
      .def("recv", &PyNativePool::recv, "line"_a, "timeout_s"_a)
      .def("arrays", &PyNativePool::arrays, "line"_a, "buffer"_a, "lease"_a)
      .def("drain", &PyNativePool::drain, "timeout_s"_a)
      .def("close", &PyNativePool::close, "timeout_s"_a)
      .def("open_xla_port", &PyNativePool::open_xla_port, "line"_a, "flight"_a, "timeout_s"_a, "ask"_a)
      .def("set_generator", &PyNativePool::set_generator, "env_id"_a, "bit_generator"_a, "is_seeded"_a)
      .def("generator", &PyNativePool::generator, "env_id"_a)
      .def("infos", &PyNativePool::infos_of, "line"_a, "buffer"_a, "lease"_a, "is_final"_a)
      .def("reset_into", &PyNativePool::reset_into, "env_id"_a, "options"_a, "line"_a, "buffer"_a, "row"_a)
      .def("rebuild",
           [](PyNativePool& self, std::uint32_t env_id) {
             self.require_env(env_id);
             self.pool().envs().rebuild(env_id);
           })
      .def("failure", &PyNativePool::failure, "env_id"_a)
      .def("action_bytes", &PyNativePool::action_bytes, "env_id"_a)
      .def("get_state", &PyNativePool::get_state, "env_id"_a)
      .def("set_state", &PyNativePool::set_state, "env_id"_a, "state"_a, "num_steps"_a, "has_ended"_a)
      .def("set_ended",
           [](PyNativePool& self, std::uint32_t env_id, bool has_ended) {
             self.require_env(env_id);
             self.pool().envs().set_ended(env_id, has_ended);
           })
      .def("runs_under_way", [](PyNativePool& self) { return self.pool().runs_under_way(); })
      .def_prop_ro("num_helpers", [](PyNativePool& self) { return self.pool().num_helpers(); })
      .def_prop_ro("step_cost_ns", [](PyNativePool& self) { return self.pool().step_cost_ns(); });

  m.attr("MOST_THREADS") = BatchLine::kMaxWriters;
}

}  // namespace envfleet
