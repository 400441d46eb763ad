// PyModel: what all native envs of one pool share, as Python holds it.
#pragma once

#include <memory>

#include "engine/registry.h"

namespace envfleet {

struct PyModel {
  std::shared_ptr<const AnyModel> model;
  Spec spec;
};

}  // namespace envfleet
