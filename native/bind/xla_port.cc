#include "bind/xla_port.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "bind/arrays.h"
#include "bind/values.h"

namespace envfleet {
namespace {

constexpr std::chrono::milliseconds kPatience{100};
constexpr std::size_t kHandleBytes = sizeof(std::uint64_t);

/// The ports of this process. Never destroyed: XLA's threads may outlive static objects.
struct Ports {
  std::mutex mutex;
  std::unordered_map<std::uint64_t, std::shared_ptr<XlaPort>> by_id;  // guarded by mutex

  static Ports& all() {
    static auto* ports = new Ports;
    return *ports;
  }
};

[[noreturn]] void refuse_closed() {
  throw xla::Refusal(xla::Code::kFailedPrecondition,
                     "PoolClosed: the pool of this handle was closed; make() another one, and call its xla()");
}

[[noreturn]] void refuse_foreign() {
  throw xla::Refusal(xla::Code::kInvalidArgument,
                     "UsageError: the handle is of a pool with other spaces or sizes than the function is for");
}

xla::Type in_xla(Dtype dtype) {
  static constexpr xla::Type kTypes[] = {// in the order of Dtype
                                         xla::Type::kBool,  xla::Type::kInt8,    xla::Type::kUint8,  xla::Type::kInt32,
                                         xla::Type::kInt64, xla::Type::kFloat32, xla::Type::kFloat64};
  return kTypes[static_cast<std::size_t>(dtype)];
}

int numpy_type_of(xla::Type type) {
  for (const Dtype dtype :
       {Dtype::kBool, Dtype::kInt8, Dtype::kUint8, Dtype::kInt32, Dtype::kInt64, Dtype::kFloat32, Dtype::kFloat64}) {
    if (in_xla(dtype) == type) return in_numpy(dtype).type;
  }
  refuse_foreign();
}

template <class From, class To>
void convert(const std::byte* from, void* to, std::size_t num_elements) {
  const auto* values = reinterpret_cast<const From*>(from);
  std::transform(values, values + num_elements, static_cast<To*>(to),
                 [](From value) { return static_cast<To>(value); });
}

/// JAX has no 64 bits unless it is told to.
void copy_elements(const std::byte* from, xla::Type from_type, void* to, xla::Type to_type, std::size_t num_elements,
                   std::size_t element_bytes) {
  using enum xla::Type;
  if (from_type == to_type) {
    std::memcpy(to, from, num_elements * element_bytes);
  } else if (from_type == kFloat64 && to_type == kFloat32) {
    convert<double, float>(from, to, num_elements);
  } else if (from_type == kFloat32 && to_type == kFloat64) {
    convert<float, double>(from, to, num_elements);
  } else if (from_type == kInt64 && to_type == kInt32) {
    convert<std::int64_t, std::int32_t>(from, to, num_elements);
  } else if (from_type == kInt32 && to_type == kInt64) {
    convert<std::int32_t, std::int64_t>(from, to, num_elements);
  } else {
    refuse_foreign();
  }
}

bool is_same_or_narrow(xla::Type type, xla::Type of) {
  return type == of || (type == xla::Type::kFloat32 && of == xla::Type::kFloat64) ||
         (type == xla::Type::kInt32 && of == xla::Type::kInt64);
}

std::uint64_t new_id() {
  static std::atomic<std::uint64_t> last_id{0};
  return ++last_id;
}

bool are_all_in_order(const std::int32_t* env_ids, std::size_t num_ids, std::size_t num_envs) {
  for (std::size_t i = 0; i < num_ids; ++i) {
    if (env_ids[i] != static_cast<std::int32_t>(i)) return false;
  }
  return num_ids == num_envs;
}

/// A copy, which may outlive the call.
nb::object array_of(const xla::Buffer& buffer) {
  const std::vector<npy_intp> dims(buffer.dims, buffer.dims + buffer.rank);
  nb::object array =
      nb::steal(PyArray_SimpleNew(static_cast<int>(dims.size()), dims.data(), numpy_type_of(buffer.type)));
  if (!array.is_valid()) throw nb::python_error();
  auto* raw = reinterpret_cast<PyArrayObject*>(array.ptr());
  std::memcpy(PyArray_DATA(raw), buffer.data, static_cast<std::size_t>(PyArray_NBYTES(raw)));
  return array;
}

xla::Refusal refusal_of(nb::python_error& error) {
  const xla::Code code = error.matches(PyExc_TimeoutError) ? xla::Code::kDeadlineExceeded
                         : error.matches(PyExc_ValueError) ? xla::Code::kInvalidArgument
                                                           : xla::Code::kInternal;
  const auto type_name = nb::cast<std::string>(error.type().attr("__name__"));
  return {code, type_name + ": " + nb::cast<std::string>(nb::str(error.value()))};
}

/// Call `use` with the GIL; what Python raises becomes a Refusal.
template <class Use>
void with_python(Use&& use) {
  if (!nb::is_alive()) throw xla::Refusal(xla::Code::kFailedPrecondition, "Python is ending");
  nb::gil_scoped_acquire locked;
  try {
    use();
  } catch (nb::python_error& error) {
    throw refusal_of(error);
  }
}

template <XlaPort::Verb kVerb>
xla::Error* answer_xla(xla::CallFrame* frame) noexcept {
  try {
    if (!xla::answer_metadata(*frame)) XlaPort::answer(kVerb, *frame);
    return nullptr;
  } catch (const xla::Refusal& refusal) {
    return xla::error_of(*frame, refusal.code, refusal.what());
  } catch (const std::exception& error) {
    return xla::error_of(*frame, xla::Code::kInternal, error.what());
  }
}

nb::capsule capsule_of(xla::Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

}  // namespace

XlaPort::XlaPort(Pool pool)
    : id_(new_id()),
      pool_(std::move(pool.engine)),
      action_leaves_(std::move(pool.action_leaves)),
      batches_(std::move(pool.batches)),
      timeout_s_(pool.timeout_s),
      flight_(std::move(pool.flight)),
      ask_(std::move(pool.ask)),
      action_wide_(action_leaves_.size()) {}

std::shared_ptr<XlaPort> XlaPort::open(Pool pool) {
  auto port = std::make_shared<XlaPort>(std::move(pool));
  Ports& ports = Ports::all();
  std::lock_guard lock(ports.mutex);
  ports.by_id.emplace(port->id_, port);
  return port;
}

// -- Python's side --

bool XlaPort::acquire(double timeout_s) {
  if (lock_.try_lock()) return true;
  Unlocked unlocked;
  return lock_.try_lock_until(deadline_in(timeout_s));
}

void XlaPort::release(bool is_plain) {
  is_plain_ = is_plain;
  lock_.unlock();
}

bool XlaPort::take_has_received() { return std::exchange(has_received_, false); }

nb::object XlaPort::episode_steps(nb::handle env_ids) {
  const auto [ids, num_ids] = int32_vector(env_ids, "env_ids");
  const auto num_envs = static_cast<std::int32_t>(pool_->envs().num_envs());
  if (std::any_of(ids, ids + num_ids, [=](std::int32_t id) { return id < 0 || id >= num_envs; })) {
    throw nb::value_error("there is no such env");
  }
  const auto length = static_cast<npy_intp>(num_ids);
  nb::object steps = nb::steal(PyArray_SimpleNew(1, &length, NPY_INT32));
  if (!steps.is_valid()) throw nb::python_error();
  auto* values = static_cast<std::int32_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(steps.ptr())));
  copy_episode_steps(ids, num_ids, values);
  return steps;
}

bool XlaPort::close(Deadline deadline) {
  {
    Ports& ports = Ports::all();
    std::lock_guard lock(ports.mutex);
    ports.by_id.erase(id_);
  }
  bool is_alone = lock_.try_lock();
  if (!is_alone) {
    Unlocked unlocked;
    is_alone = lock_.try_lock_until(deadline);
  }
  if (!is_alone) {
    ask_.release();  // never freed: the call may be using it
    return false;
  }
  is_closed_ = true;
  ask_.reset();
  lock_.unlock();
  return true;
}

// -- XLA's side --

void XlaPort::answer(Verb verb, const xla::CallFrame& frame) {
  const xla::Buffer& handle = xla::buffer_of(frame.arguments, 0);
  xla::Buffer& next_handle = xla::buffer_of(frame.results, 0);
  if (handle.num_elements() != kHandleBytes || next_handle.num_elements() != kHandleBytes) refuse_foreign();
  std::uint64_t id = 0;
  std::memcpy(&id, handle.data, kHandleBytes);
  std::shared_ptr<XlaPort> port;
  {
    Ports& ports = Ports::all();
    std::lock_guard lock(ports.mutex);
    const auto found = ports.by_id.find(id);
    if (found != ports.by_id.end()) port = found->second;
  }
  if (port == nullptr) refuse_closed();
  const std::unique_lock lock(port->lock_, deadline_in(port->timeout_s_));
  if (!lock.owns_lock()) {
    throw xla::Refusal(xla::Code::kDeadlineExceeded,
                       "PoolTimeout: another call has been using the pool all the time, for its timeout_s");
  }
  if (port->is_closed_) refuse_closed();
  if (verb != Verb::kSend) port->require_form(frame.results);  // first: a refusal must leave the pool as it was
  if (verb != Verb::kRecv) port->send(frame.arguments);
  if (verb != Verb::kSend) port->recv(frame.results);
  std::memcpy(next_handle.data, &id, kHandleBytes);
}

/// Arguments: handle, the leaves of the action, and the envs that they are for, if not for all.
void XlaPort::send(const xla::Buffers& arguments) {
  const auto num_leaves = static_cast<std::int64_t>(action_leaves_.size());
  const std::size_t num_envs = pool_->envs().num_envs();
  const std::int32_t* env_ids = nullptr;
  std::size_t num_rows = num_envs;
  if (arguments.size > num_leaves + 1) {
    const xla::Buffer& ids = xla::buffer_of(arguments, num_leaves + 1);
    if (ids.type != xla::Type::kInt32) refuse_foreign();
    env_ids = static_cast<const std::int32_t*>(ids.data);
    num_rows = ids.num_elements();
    if (are_all_in_order(env_ids, num_rows, num_envs)) env_ids = nullptr;
  }
  if (!try_send(arguments, env_ids, num_rows)) ask_to_send(arguments, env_ids == nullptr);
}

bool XlaPort::try_send(const xla::Buffers& arguments, const std::int32_t* env_ids, std::size_t num_rows) {
  if (!is_plain_) return false;
  if (env_ids == nullptr
          ? flight_->num_in_flight() != 0
          : batches_.line == kFull || num_rows == 0 || flight_->check(env_ids, num_rows) != Flight::Problem::kNone) {
    return false;
  }
  for (std::size_t leaf = 0; leaf < action_leaves_.size(); ++leaf) {
    const std::byte* rows = action_rows(leaf, xla::buffer_of(arguments, static_cast<std::int64_t>(leaf) + 1), num_rows);
    if (action_leaves_[leaf].first_wrong_row(rows, num_rows)) return false;
    write_actions(*pool_, leaf, rows, env_ids, num_rows);
  }
  pool_->send(env_ids, num_rows, Op::kStep, batches_.line);
  env_ids == nullptr ? flight_->set_all(true) : flight_->set(env_ids, num_rows, true);
  return true;
}

const std::byte* XlaPort::action_rows(std::size_t leaf, const xla::Buffer& buffer, std::size_t num_rows) {
  const ActionLeaf& known = action_leaves_[leaf];
  const std::size_t num_elements = num_rows * known.num_elements();
  if (buffer.num_elements() != num_elements) refuse_foreign();
  const auto* rows = static_cast<const std::byte*>(buffer.data);
  const xla::Type type = in_xla(known.dtype());
  if (buffer.type == type) return rows;
  std::vector<std::byte>& wide = action_wide_[leaf];
  wide.resize(num_elements * bytes_of(known.dtype()));
  copy_elements(rows, buffer.type, wide.data(), type, num_elements, bytes_of(known.dtype()));
  return wide.data();
}

void XlaPort::ask_to_send(const xla::Buffers& arguments, bool is_of_all) {
  with_python([&] {
    nb::list leaves;
    for (std::size_t leaf = 0; leaf < action_leaves_.size(); ++leaf) {
      leaves.append(array_of(xla::buffer_of(arguments, static_cast<std::int64_t>(leaf) + 1)));
    }
    nb::object env_ids = nb::none();
    if (!is_of_all) env_ids = array_of(xla::buffer_of(arguments, static_cast<std::int64_t>(action_leaves_.size()) + 1));
    ask(leaves, env_ids);
  });
}

nb::object XlaPort::ask(nb::object action_leaves, nb::object env_ids) const {
  if (!ask_.is_valid()) refuse_closed();
  return ask_(action_leaves, env_ids);
}

/// Results: handle, and the columns of a batch.
void XlaPort::recv(const xla::Buffers& results) {
  if (!try_recv(results)) ask_to_recv(results);
  has_received_ = true;
}

bool XlaPort::try_recv(const xla::Buffers& results) {
  const std::shared_ptr<BatchStore>& store = pool_->store(batches_.line);
  if (!is_plain_ || flight_->num_in_flight() < store->layout().num_rows) return false;
  const Deadline deadline = Clock::now() + kPatience;
  Waited waited;
  do {
    waited = pool_->recv(batches_.line, deadline);
  } while (waited == Waited::kInterrupted && Clock::now() < deadline);
  if (waited != Waited::kReady || (pool_->peek(batches_.line).flags & kFailed) != 0) return false;
  const std::uint32_t buffer = pool_->peek(batches_.line).buffer;
  std::byte* memory = store->memory(buffer);
  copy_batch(memory, results);
  pool_->take(batches_.line);
  if (batches_.line == kFull) {
    flight_->set_all(false);
  } else {
    flight_->set(store->column<std::int32_t>(memory, kEnvIds), store->layout().num_rows, false);
  }
  store->give_back(buffer);
  return true;
}

/// Python returns the env ids of the batch that it has received: the first column of its memory.
void XlaPort::ask_to_recv(const xla::Buffers& results) {
  with_python([&] {
    const nb::object env_ids = ask(nb::none(), nb::none());
    const auto [ids, num_ids] = int32_vector(env_ids, "env_ids");
    const BatchLayout& layout = pool_->store(batches_.line)->layout();
    if (num_ids != layout.num_rows) refuse_foreign();
    copy_batch(reinterpret_cast<const std::byte*>(ids) - layout.fields[kEnvIds].offset, results);
  });
}

void XlaPort::require_form(const xla::Buffers& results) const {
  const std::int64_t num_columns = static_cast<std::int64_t>(batches_.columns.size()) + 1;
  const std::size_t num_rows = pool_->store(batches_.line)->layout().num_rows;
  if (results.size == num_columns + 1) {
    const xla::Buffer& steps = xla::buffer_of(results, num_columns);
    if (steps.num_elements() != num_rows || steps.type != xla::Type::kInt32) refuse_foreign();
  } else if (results.size != num_columns) {
    refuse_foreign();
  }
  for (std::size_t i = 0; i < batches_.columns.size(); ++i) {
    const auto& [dtype, num_elements] = batches_.columns[i];
    const xla::Buffer& result = xla::buffer_of(results, static_cast<std::int64_t>(i) + 1);
    const xla::Type type = i == kRowFlags ? xla::Type::kBool : in_xla(dtype);
    if (result.num_elements() != num_rows * num_elements || !is_same_or_narrow(result.type, type)) refuse_foreign();
  }
}

/// Into buffers whose form was looked at.
void XlaPort::copy_batch(const std::byte* memory, const xla::Buffers& results) {
  const BatchLayout& layout = pool_->store(batches_.line)->layout();
  const RowLayout& rows = batches_.layout;
  const auto* flags = reinterpret_cast<const std::uint8_t*>(memory + layout.fields[kRowFlags].offset);
  const std::size_t num_rows = layout.num_rows;
  const auto has_final = [&](std::size_t row) { return (flags[row] & kHasFinal) != 0; };
  for (std::size_t i = 0; i < batches_.columns.size(); ++i) {
    const auto& [dtype, num_elements] = batches_.columns[i];
    const xla::Buffer& result = *results.buffers[i + 1];
    if (i == kRowFlags) {
      for (std::size_t row = 0; row < num_rows; ++row) static_cast<bool*>(result.data)[row] = has_final(row);
      continue;
    }
    const std::size_t bytes = bytes_of(dtype);
    const bool is_final_obs = rows.has_final && i >= rows.final_obs() && i < rows.infos();
    // Of rows without a final observation it is the row's own: what the step led to, in every row.
    const std::size_t source = is_final_obs ? i - rows.num_obs : i;
    copy_elements(memory + layout.fields[source].offset, in_xla(dtype), result.data, result.type,
                  num_rows * num_elements, bytes);
    if (!is_final_obs) continue;
    const std::size_t result_row_bytes =
        num_elements * (result.type == in_xla(dtype) ? bytes : bytes / 2);  // as copy_elements allows
    for (std::size_t row = 0; row < num_rows; ++row) {
      if (!has_final(row)) continue;
      copy_elements(memory + layout.fields[i].offset + row * num_elements * bytes, in_xla(dtype),
                    static_cast<std::byte*>(result.data) + row * result_row_bytes, result.type, num_elements, bytes);
    }
  }
  const auto num_results = static_cast<std::int64_t>(batches_.columns.size()) + 1;
  if (results.size == num_results) return;
  const auto* env_ids = reinterpret_cast<const std::int32_t*>(memory + layout.fields[kEnvIds].offset);
  copy_episode_steps(env_ids, num_rows, static_cast<std::int32_t*>(xla::buffer_of(results, num_results).data));
}

/// The engine hands out the number together with the state, which is not needed here.
void XlaPort::copy_episode_steps(const std::int32_t* env_ids, std::size_t num_ids, std::int32_t* steps) {
  const EnvArray& envs = pool_->envs();
  env_state_.resize(envs.state_bytes());
  for (std::size_t i = 0; i < num_ids; ++i) {
    std::uint32_t num_steps = 0;
    envs.get_state(static_cast<std::uint32_t>(env_ids[i]), env_state_.data(), &num_steps);
    steps[i] = static_cast<std::int32_t>(num_steps);
  }
}

void bind_xla_port(nb::module_& m) {
  nb::class_<XlaPort>(m, "XlaPort")
      .def_prop_ro("id", &XlaPort::id)
      .def("acquire", &XlaPort::acquire, "timeout_s"_a)
      .def("release", &XlaPort::release, "is_plain"_a)
      .def("abandon", &XlaPort::abandon)
      .def("take_has_received", &XlaPort::take_has_received)
      .def("episode_steps", &XlaPort::episode_steps, "env_ids"_a);
  m.def("xla_handlers", [] {
    nb::dict handlers;
    handlers["send"] = capsule_of(&answer_xla<XlaPort::Verb::kSend>);
    handlers["recv"] = capsule_of(&answer_xla<XlaPort::Verb::kRecv>);
    handlers["step"] = capsule_of(&answer_xla<XlaPort::Verb::kStep>);
    return handlers;
  });
}

}  // namespace envfleet
