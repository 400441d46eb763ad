// The library libenvfleet_box2d.so: loaded only when one of its environments is made, and where Box2D is.
#include "envs/box2d/bipedal_walker.h"
#include "envs/box2d/lunar_lander.h"

ENVFLEET_PLUGIN();
