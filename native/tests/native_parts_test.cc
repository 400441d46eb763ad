// The small parts of the native engine: Flight, Kwargs, Space, Random, and the list of environments.
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/flight.h"
#include "engine/kwargs.h"
#include "engine/random.h"
#include "engine/registry.h"
#include "engine/space.h"
#include "tests/check.h"
#include "tests/scripted_env.h"

namespace envfleet::test {
namespace {

template <class Run>
std::string refusal(Run&& run) {
  try {
    run();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "not refused";
}

void flight() {
  using Problem = Flight::Problem;
  Flight flight(4);
  const auto check = [&](std::vector<std::int32_t> ids) { return flight.check(ids.data(), ids.size()); };
  const auto set = [&](std::vector<std::int32_t> ids, bool flies) { flight.set(ids.data(), ids.size(), flies); };
  CHECK(check({}) == Problem::kNone && check({3, 0, 2}) == Problem::kNone);
  CHECK(check({3, 0, 2}) == Problem::kNone);  // a check leaves no trace
  CHECK(check({0, 4}) == Problem::kNoSuchEnv && check({-1}) == Problem::kNoSuchEnv);
  CHECK(check({1, 2, 1}) == Problem::kTwice);
  CHECK(flight.num_in_flight() == 0);

  set({2, 0}, true);
  CHECK(flight.num_in_flight() == 2 && flight.is_in_flight() == (std::vector<std::uint8_t>{1, 0, 1, 0}));
  CHECK(check({1, 3}) == Problem::kNone && check({1, 2}) == Problem::kBusy);
  CHECK(check({2, 2}) == Problem::kTwice && check({2, 9}) == Problem::kNoSuchEnv);
  set({2}, true);  // what flies already is not counted twice
  CHECK(flight.num_in_flight() == 2);
  set({0, 1}, false);
  CHECK(flight.num_in_flight() == 1 && check({0, 1, 3}) == Problem::kNone);

  flight.set_all(true);
  CHECK(flight.num_in_flight() == 4 && check({3}) == Problem::kBusy);
  flight.set_all(false);
  CHECK(flight.num_in_flight() == 0 && check({0, 1, 2, 3}) == Problem::kNone);
}

void kwargs_give_values_or_defaults() {
  const Kwargs none;
  CHECK(none.flag("a", true) && !none.flag("a", false) && none.number("a", 2.5) == 2.5 && none.text("a", "x") == "x");
  CHECK(none.numbers("a", {1, 2}) == (std::vector<double>{1, 2}));
  CHECK(none.texts("a", {"u"}) == (std::vector<std::string>{"u"}));

  const Kwargs kwargs({{"flag", true},
                       {"int", std::int64_t{3}},
                       {"float", 0.5},
                       {"text", std::string("8x8")},
                       {"numbers", std::vector<double>{4, 5}},
                       {"texts", std::vector<std::string>{"SF", "FG"}},
                       {"none", Foreign{"NoneType"}}});
  CHECK(kwargs.flag("flag", false) && kwargs.number("int", 0) == 3 && kwargs.number("float", 0) == 0.5);
  CHECK(kwargs.number("flag", 0) == 1);  // as in Python
  CHECK(kwargs.text("text", "") == "8x8" && kwargs.numbers("numbers", {}) == (std::vector<double>{4, 5}));
  CHECK(kwargs.texts("texts", {}) == (std::vector<std::string>{"SF", "FG"}));
  CHECK(kwargs.number("another", 7) == 7);
}

void kwargs_refuse_wrong_types() {
  const Kwargs kwargs({{"int", std::int64_t{3}}, {"text", std::string("x")}, {"thing", Foreign{"ndarray"}}});
  CHECK(refusal([&] { kwargs.flag("int", false); }) == "'int' must be True or False; got an int");
  CHECK(refusal([&] { kwargs.number("text", 0); }) == "'text' must be a number; got a string");
  CHECK(refusal([&] { kwargs.text("int", ""); }) == "'int' must be a string; got an int");
  CHECK(refusal([&] { kwargs.numbers("int", {}); }) == "'int' must be a list of numbers; got an int");
  CHECK(refusal([&] { kwargs.texts("text", {}); }) == "'text' must be a list of strings; got a string");
  CHECK(refusal([&] { kwargs.number("thing", 0); }) == "'thing' must be a number; got ndarray");
}

void a_model_refuses_unknown_names() {
  struct AskingModel : ScriptedModel {
    explicit AskingModel(const Kwargs& kwargs) { size = kwargs.number("size", 4) + kwargs.flag("is_slippery", false); }
    double size;
  };
  struct AskingEnv : ScriptedEnv<false> {
    using Model = AskingModel;
    explicit AskingEnv(const Model& model) : ScriptedEnv<false>(model) {}
  };
  const RegisteredEnv env{"Asking-v0", [](const Kwargs& kwargs) -> std::shared_ptr<const AnyModel> {
                            return std::make_shared<const ModelOf<AskingEnv>>(kwargs);
                          }};
  const auto model = make_model(env, {{"size", std::int64_t{8}}});
  CHECK(model->spec().observation.leaves().size() == 2 && model->spec().infos.size() == 2);
  CHECK(refusal([&] { make_model(env, {{"sise", 8.0}}); }) == "no argument is called 'sise'; known: is_slippery, size");
  CHECK(refusal([&] { make_model(env, {{"size", std::string("8")}}); }) == "'size' must be a number; got a string");
  CHECK(model->make_envs(1, {Autoreset::kNextStep, 0}, {2, 0, false})->num_envs() == 1);
}

void spaces_have_leaves_in_order() {
  const Space box = Space::box<float>({2, 3}, {-kInfinity}, {1});
  CHECK(box.num_elements() == 6 && box.dtype == Dtype::kFloat32 && box.leaves() == std::vector<const Space*>{&box});
  CHECK(Space::discrete(5).num_elements() == 1 && Space::discrete(5).dtype == Dtype::kInt64);
  CHECK(Space::multi_discrete({2, 3, 4}).num_elements() == 3 && Space::multi_binary({7}).dtype == Dtype::kInt8);

  const Space nested = Space::dict(
      {{"a", Space::tuple({Space::discrete(2), box})}, {"b", Space::dict({})}, {"c", Space::multi_binary({3})}});
  const auto leaves = nested.leaves();
  CHECK(nested.keys == (std::vector<std::string>{"a", "b", "c"}));
  CHECK(leaves.size() == 3 && leaves[0] == &nested.parts[0].parts[0] && leaves[1] == &nested.parts[0].parts[1] &&
        leaves[2] == &nested.parts[2]);

  CHECK(bytes_of(dtype_of<bool>()) == 1 && bytes_of(dtype_of<std::int8_t>()) == 1);
  CHECK(bytes_of(dtype_of<std::uint8_t>()) == 1 && bytes_of(dtype_of<std::int32_t>()) == 4);
  CHECK(bytes_of(dtype_of<std::int64_t>()) == 8 && bytes_of(dtype_of<float>()) == 4);
  CHECK(bytes_of(dtype_of<double>()) == 8);
  const InfoField field = info_field<double>("episode/r", {3});
  CHECK(field.name == "episode/r" && field.dtype == Dtype::kFloat64 && field.shape == Shape{3});
}

void random_draws_within_its_bounds() {
  Splitmix generator(7);
  Splitmix twin(7);
  Random random(generator.bitgen(), true);
  CHECK(random.is_newly_seeded());
  random.was_used_for_reset();
  CHECK(!random.is_newly_seeded());

  const auto twin_double = [&] { return static_cast<double>(twin.next() >> 11) * 0x1p-53; };
  for (int i = 0; i < 100; ++i) CHECK(random.random() == twin_double());
  for (int i = 0; i < 100; ++i) CHECK(random.uniform(-0.05, 0.05) == -0.05 + (0.05 - -0.05) * twin_double());

  // NumPy draws a small range from 32 bits, by Lemire's multiplication; so near to 2^32 / n it never has to draw again.
  for (int i = 0; i < 100; ++i) {
    CHECK(static_cast<std::uint64_t>(random.integers(16)) == ((twin.next() >> 32) * 16) >> 32);
  }
  for (int i = 0; i < 10; ++i) CHECK(random.integers(1) == 0);  // draws nothing
  CHECK(generator.next() == twin.next());

  constexpr int kNumDraws = 130'000;
  std::vector<int> counts(13);
  for (int i = 0; i < kNumDraws; ++i) {
    const std::int64_t drawn = random.integers(13);
    CHECK(0 <= drawn && drawn < 13);
    if (0 <= drawn && drawn < 13) ++counts[static_cast<std::size_t>(drawn)];
  }
  for (const int count : counts) CHECK(std::abs(count - kNumDraws / 13) < 5 * std::sqrt(kNumDraws / 13));

  constexpr std::int64_t kLarge = 3'000'000'000'000;
  std::int64_t largest = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::int64_t drawn = random.integers(kLarge);
    CHECK(0 <= drawn && drawn < kLarge);
    largest = std::max(largest, drawn);
  }
  CHECK(largest > kLarge / 100 * 98);

  double sum = 0, sum_of_squares = 0;
  for (int i = 0; i < 100'000; ++i) {
    const double drawn = random.normal();
    sum += drawn;
    sum_of_squares += drawn * drawn;
  }
  CHECK(std::abs(sum / 100'000) < 0.02 && std::abs(sum_of_squares / 100'000 - 1) < 0.03);
}

}  // namespace

std::vector<Test> native_parts_tests() {
  return {
      {"flight: knows who has a result to come", flight},
      {"kwargs: give values or defaults", kwargs_give_values_or_defaults},
      {"kwargs: refuse wrong types", kwargs_refuse_wrong_types},
      {"registry: a model refuses unknown names", a_model_refuses_unknown_names},
      {"space: leaves in order", spaces_have_leaves_in_order},
      {"random: draws within its bounds", random_draws_within_its_bounds},
  };
}

}  // namespace envfleet::test
