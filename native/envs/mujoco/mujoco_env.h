// MujocoEnv: what Gymnasium's environments on MuJoCo have in common. A Task is what tells one from another.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/registry.h"
#include "envs/mujoco/numpy_math.h"
#include "envs/mujoco/simulation.h"

namespace envfleet {

/// An entry of the info dictionary.
struct TaskInfo {
  std::string name;
  Dtype dtype = Dtype::kFloat64;
  std::optional<Computed> array = std::nullopt;  // otherwise it is the next of the numbers that the task notes
};

/// Infos that reset() and step() have, and those that only step() has.
struct TaskInfos {
  std::vector<TaskInfo> always = {};
  std::vector<TaskInfo> of_steps = {};
};

/// What every Task begins with. A Task is made once for a pool, from the arguments of Gymnasium's constructor (and
/// `model_path`, the file that `xml_file` means). It offers
///  - infos(): which it has. `note_reset` and `judge` note their numbers, in that order.
///  - obs_size(), observe(physics, out);
///  - draw_start(random, qpos, qvel): changes the model's initial position and velocity;
///  - note_reset(physics, notes);
///  - judge(before, physics, action, notes): reward and end, `before` and after the step.
struct MujocoTask {
  MujocoTask(const Kwargs& kwargs, int version, int default_frame_skip)
      : simulation(kwargs.text("model_path", "")),
        frame_skip(version >= 5 ? frame_skip_of(kwargs, default_frame_skip) : default_frame_skip),
        dt(simulation.model().opt.timestep * frame_skip) {}

  /// (low, high) of an argument.
  static std::pair<double, double> range(const Kwargs& kwargs, const char* name, double low, double high) {
    const std::vector<double> values = kwargs.numbers(name, {low, high});
    if (values.size() != 2) throw std::invalid_argument("'" + std::string(name) + "' must be two numbers");
    return {values[0], values[1]};
  }
  static double noise_scale(const Kwargs& kwargs, double fallback) {
    const double scale = kwargs.number("reset_noise_scale", fallback);
    if (!(scale >= 0 && std::isfinite(2 * scale))) {
      throw std::invalid_argument("'reset_noise_scale' must be finite and not negative");
    }
    return scale;
  }
  void require(bool is_right, const char* what) const {
    if (!is_right) throw std::invalid_argument(std::string("the model must have ") + what);
  }
  /// Gymnasium's older versions have their rate of frames written down.
  void require_frames_per_s(double expected) const {
    if (std::nearbyint(1.0 / dt) != expected) {
      throw std::invalid_argument("the model's timestep is not the one that the environment is made for");
    }
  }
  int body(const char* name) const {
    const int id = mj_name2id(&simulation.model(), mjOBJ_BODY, name);
    if (id < 0) throw std::invalid_argument(std::string("the model must have a body '") + name + "'");
    return id;
  }

  void add_uniform(Random& random, double scale, double* values, std::size_t size) const {
    for (std::size_t i = 0; i < size; ++i) values[i] += random.uniform(-scale, scale);
  }
  void add_normal(Random& random, double scale, double* values, std::size_t size) const {
    for (std::size_t i = 0; i < size; ++i) values[i] += scale * random.normal();
  }

  /// weight * np.sum(np.square(action)): in float32, as actions are.
  float action_cost(double weight, const float* action) const {
    return static_cast<float>(weight) * numpy_sum_of_squares(action, simulation.nu());
  }

  Simulation simulation;
  int frame_skip;
  double dt;  // seconds of a step

 private:
  static int frame_skip_of(const Kwargs& kwargs, int fallback) {
    const double frames = kwargs.number("frame_skip", fallback);
    if (!(frames >= 1 && frames <= 1e6 && frames == std::floor(frames))) {
      throw std::invalid_argument("'frame_skip' must be a positive integer");
    }
    return static_cast<int>(frames);
  }
};

inline void note(double* notes, std::initializer_list<double> values) {
  std::copy(values.begin(), values.end(), notes);
}

template <class T>
T* append(const T* values, std::size_t size, T* out) {
  std::memcpy(out, values, size * sizeof(T));
  return out + size;
}

inline double* append_clipped(const double* values, std::size_t size, double low, double high, double* out) {
  for (std::size_t i = 0; i < size; ++i) out[i] = numpy_clip(values[i], low, high);
  return out + size;
}

template <class Task>
struct MujocoEnv {
  struct Model {
    explicit Model(const Kwargs& kwargs) : task(kwargs), infos(task.infos().always), num_always(infos.size()) {
      const std::vector<TaskInfo> of_steps = task.infos().of_steps;
      infos.insert(infos.end(), of_steps.begin(), of_steps.end());
      for (const TaskInfo& info : infos) num_notes += !info.array;
    }

    Spec spec() const {
      const Simulation& simulation = task.simulation;
      std::vector<double> low, high;
      for (std::size_t i = 0; i < simulation.nu(); ++i) {
        low.push_back(simulation.model().actuator_ctrlrange[2 * i]);
        high.push_back(simulation.model().actuator_ctrlrange[2 * i + 1]);
      }
      Spec spec{
          .observation = Space::box<double>({static_cast<std::int64_t>(task.obs_size())}, {-kInfinity}, {kInfinity}),
          .action = Space::box<float>({static_cast<std::int64_t>(simulation.nu())}, low, high),
          .step_s = task.dt};
      for (const TaskInfo& info : infos) {
        Shape shape;
        if (info.array) shape = {static_cast<std::int64_t>(simulation.size(*info.array))};
        spec.infos.push_back({info.name, info.dtype, std::move(shape)});
      }
      return spec;
    }

    Task task;
    std::vector<TaskInfo> infos;
    std::size_t num_always;  // the first so many infos are there after a reset, too
    std::size_t num_notes = 0;
  };

  explicit MujocoEnv(const Model& shared)
      : model(&shared), state(shared.task.simulation.state_size() + shared.num_notes + 1) {}

  void reset(Random& random, const Kwargs&) {
    const Task& task = model->task;
    task.simulation.reset(state.data(), [&](double* qpos, double* qvel) { task.draw_start(random, qpos, qvel); });
    task.note_reset(physics(), notes());
    state.back() = kAfterReset;
  }

  Outcome step(Action action, Random&) {
    const Task& task = model->task;
    const float* ctrl = action.leaf<float>();
    const auto before = task.before(physics());
    task.simulation.step(state.data(), ctrl, task.frame_skip);
    state.back() = kAfterStep;
    return task.judge(before, physics(), ctrl, notes());
  }

  void observe(Obs obs) const { model->task.observe(physics(), obs.leaf<double>()); }

  void inform(Info info) const {
    const std::size_t num_infos = state.back() == kAfterReset ? model->num_always : model->infos.size();
    const double* noted = state.data() + model->task.simulation.state_size();
    for (std::size_t i = 0; i < num_infos; ++i) {
      const TaskInfo& each = model->infos[i];
      if (each.array) {
        append(physics()[*each.array], model->task.simulation.size(*each.array), info.array<double>(i));
        continue;
      }
      const double value = *noted++;
      if (each.dtype == Dtype::kFloat32) {
        info.set(i, static_cast<float>(value));
      } else if (each.dtype == Dtype::kInt64) {
        info.set(i, static_cast<std::int64_t>(value));
      } else {
        info.set(i, value);
      }
    }
  }

  std::size_t state_bytes() const { return state.size() * sizeof(double); }
  void save(std::byte* bytes) const { std::memcpy(bytes, state.data(), state_bytes()); }
  void load(const std::byte* bytes) { std::memcpy(state.data(), bytes, state_bytes()); }

  const Model* model;

 private:
  static constexpr double kAfterReset = 0.0;
  static constexpr double kAfterStep = 1.0;

  Physics physics() const { return {model->task.simulation, state.data()}; }
  double* notes() { return state.data() + model->task.simulation.state_size(); }

  std::vector<double> state;  // of the simulation; what the task noted; after a reset, or a step
};

}  // namespace envfleet
