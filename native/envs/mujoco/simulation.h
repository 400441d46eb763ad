// Simulation: a MuJoCo model, shared by all envs of a pool, and the mjData on which its threads step them.
#pragma once

#include <mujoco/mujoco.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "envs/mujoco/guard.h"

namespace envfleet {

/// Arrays of mjData that a step computes and somebody reads afterwards: rewards, observations, Gymnasium's renderer.
/// envfleet.pool.simulators.mujoco has the same list.
enum class Computed : std::uint8_t {
  kXpos,
  kXquat,
  kXmat,
  kXipos,
  kXimat,
  kGeomXpos,
  kGeomXmat,
  kSiteXpos,
  kSiteXmat,
  kCamXpos,
  kCamXmat,
  kLightXpos,
  kLightXdir,
  kSubtreeCom,
  kCinert,
  kCvel,
  kCfrcExt,
  kQfrcActuator,
  kQfrcConstraint,
  kTenLength,
  kTenVelocity,
};

struct ComputedArray {
  mjtNum* mjData::* array;
  mjtSize mjModel::* num_rows;
  std::size_t row_size;
};

inline constexpr ComputedArray kComputed[] = {
    // in the order of Computed
    {&mjData::xpos, &mjModel::nbody, 3},           {&mjData::xquat, &mjModel::nbody, 4},
    {&mjData::xmat, &mjModel::nbody, 9},           {&mjData::xipos, &mjModel::nbody, 3},
    {&mjData::ximat, &mjModel::nbody, 9},          {&mjData::geom_xpos, &mjModel::ngeom, 3},
    {&mjData::geom_xmat, &mjModel::ngeom, 9},      {&mjData::site_xpos, &mjModel::nsite, 3},
    {&mjData::site_xmat, &mjModel::nsite, 9},      {&mjData::cam_xpos, &mjModel::ncam, 3},
    {&mjData::cam_xmat, &mjModel::ncam, 9},        {&mjData::light_xpos, &mjModel::nlight, 3},
    {&mjData::light_xdir, &mjModel::nlight, 3},    {&mjData::subtree_com, &mjModel::nbody, 3},
    {&mjData::cinert, &mjModel::nbody, 10},        {&mjData::cvel, &mjModel::nbody, 6},
    {&mjData::cfrc_ext, &mjModel::nbody, 6},       {&mjData::qfrc_actuator, &mjModel::nv, 1},
    {&mjData::qfrc_constraint, &mjModel::nv, 1},   {&mjData::ten_length, &mjModel::ntendon, 1},
    {&mjData::ten_velocity, &mjModel::ntendon, 1},
};
inline constexpr std::size_t kNumComputed = std::size(kComputed);

/// All numbers of one env lie side by side: what MuJoCo needs to go on (mjSTATE_INTEGRATION), then what it computed
/// last. So an env is a few kilobytes, where an mjData is half a megabyte, and is saved by copying it.
///
/// To go on from there is exact: mj_step reads nothing else.
class Simulation {
 public:
  explicit Simulation(const std::string& path) : model_(load(path)) {
    const mjModel& m = *model_;
    if (m.nplugin > 0) throw std::invalid_argument("models with plugins are not supported");
    if ((m.opt.enableflags & mjENBL_SLEEP) != 0) throw std::invalid_argument("models that sleep are not supported");
    require_no_callbacks();
    const auto num_before = [&](int element) {
      return static_cast<std::size_t>(mj_stateSize(&m, mjSTATE_INTEGRATION & (element - 1)));
    };
    qpos_ = num_before(mjSTATE_QPOS);
    qvel_ = num_before(mjSTATE_QVEL);
    ctrl_ = num_before(mjSTATE_CTRL);
    state_size_ = static_cast<std::size_t>(mj_stateSize(&m, mjSTATE_INTEGRATION));
    for (std::size_t i = 0; i < kNumComputed; ++i) {
      computed_[i] = {state_size_, static_cast<std::size_t>(m.*kComputed[i].num_rows) * kComputed[i].row_size};
      state_size_ += computed_[i].size;
    }
  }
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  const mjModel& model() const { return *model_; }
  std::size_t nq() const { return static_cast<std::size_t>(model_->nq); }
  std::size_t nv() const { return static_cast<std::size_t>(model_->nv); }
  std::size_t nu() const { return static_cast<std::size_t>(model_->nu); }
  std::size_t nbody() const { return static_cast<std::size_t>(model_->nbody); }
  std::size_t state_size() const { return state_size_; }  // of one env, in numbers

  const double* qpos(const double* state) const { return state + qpos_; }
  const double* qvel(const double* state) const { return state + qvel_; }
  const double* ctrl(const double* state) const { return state + ctrl_; }
  const double* computed(Computed array, const double* state) const {
    return state + computed_[static_cast<std::size_t>(array)].offset;
  }
  std::size_t size(Computed array) const { return computed_[static_cast<std::size_t>(array)].size; }

  /// `draw_start` changes qpos and qvel, which are the model's initial ones.
  template <class DrawStart>
  void reset(double* state, const DrawStart& draw_start) const {
    require_no_callbacks();
    Bench bench(*this);
    mjData* d = bench.data();
    bench.call([&] { mj_resetData(model_.get(), d); });
    draw_start(d->qpos, d->qvel);
    bench.call([&] { mj_forward(model_.get(), d); });
    save(*d, state);
  }

  void step(double* state, const float* ctrl, int num_frames) const {
    require_no_callbacks();
    Bench bench(*this);
    mjData* d = bench.data();
    const mjModel* m = model_.get();
    bench.call([&] {
      mj_setState(m, d, state, mjSTATE_INTEGRATION);
      for (mjtSize i = 0; i < m->nu; ++i) d->ctrl[i] = ctrl[i];
      for (int frame = 0; frame < num_frames; ++frame) mj_step(m, d);
      mj_rnePostConstraint(m, d);  // cfrc_ext: mj_step computes it only for sensors
    });
    save(*d, state);
  }

 private:
  /// They are the whole process's, and those of the Python bindings want models that the bindings have made.
  static void require_no_callbacks() {
    if (mjcb_passive || mjcb_control || mjcb_contactfilter || mjcb_sensor || mjcb_act_dyn || mjcb_act_gain ||
        mjcb_act_bias) {
      throw std::invalid_argument("callbacks of MuJoCo are set in this process: use backend='process'");
    }
  }

  struct FreeModel {
    void operator()(mjModel* model) const { mj_deleteModel(model); }
  };
  struct FreeData {
    void operator()(mjData* data) const { mj_deleteData(data); }
  };
  using Data = std::unique_ptr<mjData, FreeData>;
  struct Part {
    std::size_t offset, size;
  };

  /// The mjData of this thread, as long as the object lives. A thread gets the one it had before, if it can: that is
  /// in its cache.
  class Bench {
   public:
    explicit Bench(const Simulation& simulation) : simulation_(simulation), data_(simulation.take_data()) {}
    Bench(const Bench&) = delete;
    Bench& operator=(const Bench&) = delete;
    ~Bench() {
      if (data_) simulation_.give_back(std::move(data_));
    }

    mjData* data() const { return data_.get(); }

    template <class Call>
    void call(const Call& call) {
      try {
        call_mujoco(call);
      } catch (const MujocoError&) {
        data_.reset();
        throw;
      }
    }

   private:
    const Simulation& simulation_;
    Data data_;
  };

  static std::unique_ptr<mjModel, FreeModel> load(const std::string& path) {
    char error[1024] = "";
    mjModel* model = nullptr;
    call_mujoco([&] { model = mj_loadXML(path.c_str(), nullptr, error, sizeof(error)); }, true);
    if (model == nullptr) throw std::invalid_argument(path + ": " + error);
    return std::unique_ptr<mjModel, FreeModel>(model);
  }

  void save(const mjData& d, double* state) const {
    mj_getState(model_.get(), &d, state, mjSTATE_INTEGRATION);
    for (std::size_t i = 0; i < kNumComputed; ++i) {
      std::memcpy(state + computed_[i].offset, d.*kComputed[i].array, computed_[i].size * sizeof(double));
    }
  }

  static std::size_t own_place() {
    static std::atomic<std::size_t> num_threads{0};
    static thread_local const std::size_t place = num_threads.fetch_add(1, std::memory_order_relaxed);
    return place % kNumPlaces;
  }

  Data take_data() const {
    const std::lock_guard lock(mutex_);
    Data data = std::move(places_[own_place()]);
    if (!data && !others_.empty()) {
      data = std::move(others_.back());
      others_.pop_back();
    }
    for (auto place = places_.begin(); !data && place != places_.end(); ++place) data = std::move(*place);
    if (data) return data;
    mjData* made = nullptr;
    call_mujoco([&] { made = mj_makeData(model_.get()); });
    if (made == nullptr) throw std::bad_alloc();
    return Data(made);
  }

  void give_back(Data data) const {
    const std::lock_guard lock(mutex_);
    Data& place = places_[own_place()];
    if (!place) {
      place = std::move(data);
    } else {
      others_.push_back(std::move(data));
    }
  }

  static constexpr std::size_t kNumPlaces = 256;

  std::unique_ptr<mjModel, FreeModel> model_;
  std::size_t qpos_, qvel_, ctrl_, state_size_;
  std::array<Part, kNumComputed> computed_;
  mutable std::mutex mutex_;
  mutable std::array<Data, kNumPlaces> places_;  // guarded by mutex_: each thread's, while it does not use it
  mutable std::vector<Data> others_;             // guarded by mutex_: of threads that share a place
};

/// What one env of a simulation shows.
class Physics {
 public:
  Physics(const Simulation& simulation, const double* state) : simulation_(simulation), state_(state) {}

  const double* qpos() const { return simulation_.qpos(state_); }
  const double* qvel() const { return simulation_.qvel(state_); }
  const double* ctrl() const { return simulation_.ctrl(state_); }
  const double* operator[](Computed array) const { return simulation_.computed(array, state_); }
  const double* xpos(int body) const { return (*this)[Computed::kXpos] + 3 * body; }

 private:
  const Simulation& simulation_;
  const double* state_;
};

}  // namespace envfleet
