// Parts of which Gymnasium's environments on Box2D are made, and the listener that knows what touches the ground.
#pragma once

#include <box2d/box2d.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <utility>

namespace envfleet {

/// The arguments of an environment's constructor, as numbers.
using Settings = std::array<double, 5>;

inline constexpr double kFramesPerS = 50;
inline constexpr double kScale = 30.0;  // pixels in a unit of length
inline constexpr double kViewportW = 600;
inline constexpr double kViewportH = 400;
inline constexpr int kVelocityIterations = 6 * 30;
inline constexpr int kPositionIterations = 2 * 30;

inline constexpr std::uint16_t kGround = 0x0001;  // a category: all else collides with the ground only

inline b2Vec2 vec(double x, double y) { return {static_cast<float>(x), static_cast<float>(y)}; }

/// What a body is to the listener.
enum class Role : std::uintptr_t { kNone = 0, kHull, kFirstFoot, kSecondFoot };

/// Has the hull touched anything? Do the feet? As in Gymnasium, a foot with two contacts is in the air when one ends.
class TouchSensor final : public b2ContactListener {
 public:
  void clear() { *this = {}; }
  bool has_crashed() const { return has_crashed_; }
  bool is_down(std::size_t foot) const { return is_down_[foot]; }

  void BeginContact(b2Contact* contact) override {
    for (const Role role : roles(contact)) {
      if (role == Role::kHull) has_crashed_ = true;
      note_foot(role, true);
    }
  }
  void EndContact(b2Contact* contact) override {
    for (const Role role : roles(contact)) note_foot(role, false);
  }

 private:
  static std::array<Role, 2> roles(b2Contact* contact) {
    const auto role = [](b2Fixture* fixture) { return static_cast<Role>(fixture->GetBody()->GetUserData().pointer); };
    return {role(contact->GetFixtureA()), role(contact->GetFixtureB())};
  }
  void note_foot(Role role, bool is_down) {
    if (role == Role::kFirstFoot) is_down_[0] = is_down;
    if (role == Role::kSecondFoot) is_down_[1] = is_down;
  }

  bool has_crashed_ = false;
  std::array<bool, 2> is_down_{};
};

inline bool is_anything_touched(const b2World& world) {
  for (const b2Contact* contact = world.GetContactList(); contact != nullptr; contact = contact->GetNext()) {
    if (contact->IsTouching()) return true;
  }
  return false;
}

inline b2PolygonShape polygon(std::initializer_list<std::pair<double, double>> corners) {
  b2Vec2 points[b2_maxPolygonVertices];
  int32 num_points = 0;
  for (const auto& [x, y] : corners) points[num_points++] = vec(x, y);
  b2PolygonShape shape;
  shape.Set(points, num_points);
  return shape;
}

inline b2PolygonShape box(double half_width, double half_height) {
  b2PolygonShape shape;
  shape.SetAsBox(static_cast<float>(half_width), static_cast<float>(half_height));
  return shape;
}

inline b2EdgeShape edge(const b2Vec2& from, const b2Vec2& to) {
  b2EdgeShape shape;
  shape.SetTwoSided(from, to);
  return shape;
}

/// How a body that moves differs from another.
struct Part {
  Role role;
  std::uint16_t category;
  float density;
  float friction = 0.2f;
};

inline b2Body* add_part(b2World& world, const Part& part, const b2Shape& shape, const b2Vec2& position, float angle) {
  b2BodyDef body_def;
  body_def.type = b2_dynamicBody;
  body_def.position = position;
  body_def.angle = angle;
  body_def.userData.pointer = static_cast<std::uintptr_t>(part.role);
  b2Body* body = world.CreateBody(&body_def);
  b2FixtureDef fixture_def;
  fixture_def.shape = &shape;
  fixture_def.density = part.density;
  fixture_def.friction = part.friction;
  fixture_def.filter.categoryBits = part.category;
  fixture_def.filter.maskBits = kGround;
  body->CreateFixture(&fixture_def);
  return body;
}

inline void add_ground(b2Body* body, const b2Shape& shape, float friction) {
  b2FixtureDef fixture_def;
  fixture_def.shape = &shape;
  fixture_def.friction = friction;
  body->CreateFixture(&fixture_def);
}

/// A motor with limits between two bodies.
struct Hinge {
  b2Body* a;
  b2Body* b;
  b2Vec2 anchor_a;
  b2Vec2 anchor_b;
  double torque;
  double speed;
  double lower;
  double upper;
};

inline b2RevoluteJoint* add_hinge(b2World& world, const Hinge& hinge) {
  b2RevoluteJointDef def;
  def.bodyA = hinge.a;
  def.bodyB = hinge.b;
  def.localAnchorA = hinge.anchor_a;
  def.localAnchorB = hinge.anchor_b;
  def.referenceAngle = hinge.b->GetAngle() - hinge.a->GetAngle();  // as Python's Box2D has it, unlike the library
  def.enableMotor = true;
  def.enableLimit = true;
  def.maxMotorTorque = static_cast<float>(hinge.torque);
  def.motorSpeed = static_cast<float>(hinge.speed);
  def.lowerAngle = static_cast<float>(hinge.lower);
  def.upperAngle = static_cast<float>(hinge.upper);
  return static_cast<b2RevoluteJoint*>(world.CreateJoint(&def));
}

/// Makes the limits of a joint act as in Box2D 2.3, which Gymnasium runs: in a step that begins beyond them, and in no
/// other. From 2.4 on a joint slows down before it reaches them; the walker would then stand up in another way, and
/// landers would come to rest later.
inline void limit_as_before(b2RevoluteJoint* joint) {
  const float angle = joint->GetJointAngle();
  joint->EnableLimit(angle <= joint->GetLowerLimit() || angle >= joint->GetUpperLimit());
}

/// Box2D fills a table when the first contact of a program comes up. That must not happen on two threads at once.
inline void prepare_box2d() {
  static std::once_flag once;
  std::call_once(once, [] {
    b2World world(b2Vec2(0, 0));
    const b2PolygonShape shape = box(1, 1);
    b2BodyDef ground_def;
    add_ground(world.CreateBody(&ground_def), shape, 0.0f);
    add_part(world, {Role::kNone, 2, 1.0f}, shape, b2Vec2(0, 0), 0.0f);
    world.Step(0.02f, 1, 1);
  });
}

}  // namespace envfleet
