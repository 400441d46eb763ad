// The enums that C++ and Python share. All are integers, so that Python may write RowFlag.FAILED | RowFlag.HAS_FINAL.
#include "bind/python.h"
#include "engine/batch_line.h"
#include "engine/env_array.h"
#include "engine/episode.h"
#include "engine/flight.h"
#include "engine/shared_task_queues.h"
#include "engine/task_queue.h"

namespace envfleet {

void bind_enums(nb::module_& m) {
  nb::enum_<Autoreset>(m, "Autoreset", nb::is_arithmetic())
      .value("NEXT_STEP", Autoreset::kNextStep)
      .value("SAME_STEP", Autoreset::kSameStep)
      .value("DISABLED", Autoreset::kDisabled);
  nb::enum_<Line>(m, "Line", nb::is_arithmetic()).value("FULL", kFull).value("FIRST_READY", kFirstReady);
  nb::enum_<Op>(m, "Op", nb::is_arithmetic())
      .value("STEP", Op::kStep)
      .value("RESET", Op::kReset)
      .value("REPEAT", Op::kRepeat)
      .value("REQUEST", Op::kRequest)
      .value("STOP", Op::kStop);
  nb::enum_<RowFlag>(m, "RowFlag", nb::is_arithmetic())
      .value("COMPLETE", kComplete)
      .value("HAS_FINAL", kHasFinal)
      .value("HAS_OBJECTS", kHasObjects)
      .value("FAILED", kFailed);
  nb::enum_<Waiting>(m, "Waiting", nb::is_arithmetic())
      .value("READY", Waiting::kReady)
      .value("NEWS", Waiting::kNews)
      .value("TIMED_OUT", Waiting::kTimedOut)
      .value("INTERRUPTED", Waiting::kInterrupted);
  nb::enum_<Flight::Problem>(m, "SendProblem", nb::is_arithmetic())
      .value("NONE", Flight::Problem::kNone)
      .value("NO_SUCH_ENV", Flight::Problem::kNoSuchEnv)
      .value("NAMED_TWICE", Flight::Problem::kTwice)
      .value("BUSY", Flight::Problem::kBusy);
  nb::enum_<EnvFailure::During>(m, "During", nb::is_arithmetic())
      .value("STEP", EnvFailure::During::kStep)
      .value("AUTORESET", EnvFailure::During::kAutoreset)
      .value("RESET", EnvFailure::During::kReset)
      .value("ENDED", EnvFailure::During::kEnded);
}

}  // namespace envfleet
