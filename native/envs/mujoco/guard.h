// call_mujoco: calls MuJoCo so that its errors become exceptions, and its warnings go to the log of EnvFleet instead of
// to the console and to MUJOCO_LOG.TXT.
#pragma once

#include <mujoco/mujoco.h>

#include <csetjmp>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>

// Not in MuJoCo's headers, but what its own Python bindings use: the handler of this thread alone. Returns the
// previous.
extern "C" mjfLogHandler _mjPRIVATE_setTlsLogHandler(mjfLogHandler handler);

namespace envfleet {

/// MuJoCo could not go on. The mjData of the call is in no state to be used again.
struct MujocoError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Where warnings go: set by Python, which has them logged.
using MujocoReport = void (*)(const char* text, bool is_about_model);

struct MujocoWarnings {
  std::mutex mutex;
  MujocoReport report = nullptr;  // guarded by mutex
  std::set<std::string> told_of;  // guarded by mutex
};

/// Never destroyed: a thread may still warn when the program ends.
inline MujocoWarnings& mujoco_warnings() {
  static auto* warnings = new MujocoWarnings;
  return *warnings;
}

/// Each kind of warning is told of once in a program. It ends with the time at which it came up, and often comes again.
inline void tell_of_warning(const char* text, bool is_about_model) {
  MujocoWarnings& warnings = mujoco_warnings();
  MujocoReport report;
  {
    const std::lock_guard lock(warnings.mutex);
    const std::string whole(text);
    if (!warnings.told_of.insert(whole.substr(0, whole.find(" Time ="))).second) return;
    report = warnings.report;
  }
  // Without the lock: the report waits for Python's, whose holder may be waiting for ours.
  if (report != nullptr) report(text, is_about_model);
}

struct MujocoCall {
  bool is_about_model;  // it is being loaded
  std::jmp_buf on_error;
  char what[sizeof(mjLogMessage::subject)];
};
inline thread_local MujocoCall* mujoco_call_under_way = nullptr;

inline void on_mujoco_message(const mjLogMessage* message) {
  if (message->level == mjLOG_ERROR) {
    MujocoCall& call = *mujoco_call_under_way;
    std::memcpy(call.what, message->subject, sizeof(call.what));
    std::longjmp(call.on_error, 1);  // to return would end the program
  }
  if (message->level == mjLOG_WARNING) {
    tell_of_warning(message->subject, mujoco_call_under_way->is_about_model);
  }
}

/// MuJoCo times the stages of each step if it has a clock, and its Python bindings give it one, which costs more than
/// all that we add to a step. Nobody reads these times of our mjData: the clock stands still for us, and goes on for
/// others.
struct MujocoClock {
  MujocoClock() {
    others = mjcb_time;
    mjcb_time = [] { return mujoco_call_under_way != nullptr || others == nullptr ? 0.0 : others(); };
  }
  static inline mjfTime others = nullptr;
};

/// `call` may have nothing to destroy: an error of MuJoCo leaves it by a jump. (A C++ exception of MuJoCo's, which its
/// compiler throws if memory does not suffice, ends the program: it comes from another C++ library, and cannot be
/// caught.)
template <class Call>
void call_mujoco(const Call& call, bool is_about_model = false) {
  MujocoCall under_way;
  under_way.is_about_model = is_about_model;
  mujoco_call_under_way = &under_way;
  const mjfLogHandler before = _mjPRIVATE_setTlsLogHandler(on_mujoco_message);
  volatile bool has_failed = true;  // volatile: it changes after setjmp
  if (setjmp(under_way.on_error) == 0) {
    call();
    has_failed = false;
  }
  _mjPRIVATE_setTlsLogHandler(before);
  mujoco_call_under_way = nullptr;
  if (has_failed) throw MujocoError(std::string("MuJoCo: ") + under_way.what);
}

}  // namespace envfleet
