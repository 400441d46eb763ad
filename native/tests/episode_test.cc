// The episode rule of native envs in every autoreset mode, in rows that belong to envs and in rows that are claimed;
// and what becomes of an env that throws.
#include "engine/episode.h"

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/scripted_env.h"

namespace envfleet::test {
namespace {

using During = EnvFailure::During;

/// One env of a pool.
class OneEnv {
 public:
  /// On line 0 the env's row is its own, on line 1 it is claimed.
  OneEnv(std::uint8_t line, Autoreset autoreset, std::uint32_t max_episode_steps = 0)
      : line_(line),
        pool_({.num_envs = line == 0 ? 1u : 2u,
               .batch_size = line == 0 ? 0u : 1u,
               .autoreset = autoreset,
               .max_episode_steps = max_episode_steps}) {}

  Seen step(Command command, std::int32_t number = 0) {
    pool_.set_action(0, {command, number});
    return run(Op::kStep);
  }
  Seen reset(Kwargs options = {}) {
    pool_.pool->set_options(std::move(options));
    return run(Op::kReset);
  }
  Seen run(Op op) {
    const std::int32_t env_id = 0;
    pool_.pool->send(&env_id, 1, op, line_);
    const Seen seen = pool_.receive(line_).at(0);
    CHECK(seen.env_id == 0 && (seen.flags & kComplete));
    return seen;
  }
  EnvArray& envs() { return pool_.pool->envs(); }
  bool has_failed(const Seen& seen, During during, const std::string& what) {
    return (seen.flags & kFailed) && envs().failure(0).during == during && envs().failure(0).what == what;
  }

 private:
  std::uint8_t line_;
  ScriptedPool<true> pool_;
};

/// Is this the first row of an episode?
bool is_first(const Seen& seen, std::int64_t num_episodes) {
  return seen.now.num_episodes() == num_episodes && seen.now.num_steps() == 0 && seen.now.number() == -1 &&
         seen.reward == 0.0 && !seen.terminated && !seen.truncated && seen.flags == kComplete;
}

/// Is this a row inside an episode, or the last one of it?
bool is_step(const Seen& seen, std::int64_t num_episodes, std::int64_t num_steps, std::int32_t number) {
  return seen.now.num_episodes() == num_episodes && seen.now.num_steps() == num_steps && seen.now.number() == number &&
         seen.reward == number && seen.now.info_steps == num_steps && seen.flags == kComplete;
}

Kwargs options(const char* name, Value value) { return Kwargs({{name, std::move(value)}}); }

template <std::uint8_t kLine>
void next_step_autoreset() {
  OneEnv env(kLine, Autoreset::kNextStep);
  const Seen first = env.reset(options("number", std::int64_t{5}));
  CHECK(first.now.number() == 5 && first.now.num_episodes() == 1 && first.now.info_steps == 0);
  CHECK(first.now.info_draws == first.now.draws);
  const Seen second = env.step(Command::kGo, 10);
  CHECK(is_step(second, 1, 1, 10) && second.now.info_draws[0] == -1 && second.now.draws[0] == first.now.draws[0]);
  const Seen last = env.step(Command::kTerminate, 11);
  CHECK(is_step(last, 1, 2, 11) && last.terminated && !last.truncated);
  CHECK(env.envs().has_ended(0));
  // The step that resets ignores its action, and does not pass the options of the last reset on.
  CHECK(is_first(env.step(Command::kThrow, 12), 2));
  CHECK(!env.envs().has_ended(0));
  const Seen cut = env.step(Command::kTruncate, 13);
  CHECK(is_step(cut, 2, 1, 13) && !cut.terminated && cut.truncated);
  CHECK(is_first(env.reset(), 3));  // an explicit reset after the end: the next step is no reset
  CHECK(is_step(env.step(Command::kGo, 14), 3, 1, 14));
  CHECK(is_first(env.reset(), 4));  // in the middle of an episode
}

template <std::uint8_t kLine>
void same_step_autoreset() {
  OneEnv env(kLine, Autoreset::kSameStep);
  CHECK(is_first(env.reset(), 1));
  CHECK(is_step(env.step(Command::kGo, 9), 1, 1, 9));
  for (std::int64_t episode = 1; episode <= 3; ++episode) {
    const Command command = episode == 2 ? Command::kTruncate : Command::kTerminate;
    const Seen last = env.step(command, 10);
    CHECK(last.flags == (kComplete | kHasFinal) && last.reward == 10);
    CHECK(last.terminated == (episode != 2) && last.truncated == (episode == 2));
    CHECK(last.final.num_episodes() == episode && last.final.num_steps() == 2 && last.final.number() == 10);
    CHECK(last.final.info_steps == 2 && last.final.info_draws == last.final.draws);
    CHECK(last.now.num_episodes() == episode + 1 && last.now.num_steps() == 0 && last.now.number() == -1);
    CHECK(last.now.info_steps == 0 && last.now.info_draws == last.now.draws);
    CHECK(!env.envs().has_ended(0));
    CHECK(is_step(env.step(Command::kGo, 11), episode + 1, 1, 11));
  }
}

template <std::uint8_t kLine>
void disabled_autoreset() {
  OneEnv env(kLine, Autoreset::kDisabled);
  CHECK(is_first(env.reset(), 1));
  const Seen last = env.step(Command::kTerminate, 10);
  CHECK(is_step(last, 1, 1, 10) && last.terminated);
  for (int i = 0; i < 2; ++i) {
    const Seen refused = env.step(Command::kGo, 11);
    CHECK(env.has_failed(refused, During::kEnded, StepOnEndedEpisode().what()));
    CHECK(!refused.terminated && !refused.truncated && refused.reward == 0);
    CHECK(refused.now.facts == last.now.facts);  // the env was left alone
  }
  CHECK(is_first(env.reset(), 2));
  CHECK(is_step(env.step(Command::kGo, 12), 2, 1, 12));
}

template <std::uint8_t kLine>
void time_limit() {
  for (const Autoreset autoreset : {Autoreset::kNextStep, Autoreset::kSameStep, Autoreset::kDisabled}) {
    OneEnv env(kLine, autoreset, 3);
    env.reset();
    for (int episode = 1; episode <= 2; ++episode) {
      for (int i = 1; i < 3; ++i) CHECK(!env.step(Command::kGo).truncated);
      const Seen last = env.step(episode == 1 ? Command::kGo : Command::kTerminate);
      CHECK(last.truncated && last.terminated == (episode == 2));
      CHECK((autoreset == Autoreset::kSameStep ? last.final : last.now).num_steps() == 3);
      if (autoreset == Autoreset::kNextStep) CHECK(is_first(env.step(Command::kGo), episode + 1));
      if (autoreset == Autoreset::kDisabled) CHECK(is_first(env.reset(), episode + 1));
    }
    env.step(Command::kGo);
    env.reset();  // begins a new count
    for (int i = 1; i < 3; ++i) CHECK(!env.step(Command::kGo).truncated);
    CHECK(env.step(Command::kGo).truncated);
  }
}

template <std::uint8_t kLine>
void failures() {
  for (const Autoreset autoreset : {Autoreset::kNextStep, Autoreset::kSameStep, Autoreset::kDisabled}) {
    OneEnv env(kLine, autoreset);
    const auto is_cut = [](const Seen& seen) {
      return seen.flags == (kComplete | kFailed) && seen.truncated && !seen.terminated && seen.reward == 0 &&
             seen.now.info_steps == -1 && seen.now.info_draws[0] == -1;
    };
    env.reset();
    const Seen before = env.step(Command::kGo, 10);
    Seen seen = env.step(Command::kThrow, 11);
    CHECK(is_cut(seen) && env.has_failed(seen, During::kStep, "bad step"));
    CHECK(seen.now.facts == before.now.facts && seen.now.draws == before.now.draws);  // what the env still shows
    CHECK(env.envs().has_ended(0));

    env.reset();
    seen = env.step(Command::kThrowNumber, 11);
    CHECK(is_cut(seen) && env.has_failed(seen, During::kStep, "an exception that is no std::exception"));

    CHECK(is_first(env.reset(), 3));
    seen = env.step(Command::kThrowAtObserve, 12);
    CHECK(is_cut(seen) && env.has_failed(seen, During::kStep, "bad observation"));
    CHECK(seen.now.facts == Seen::View().facts);  // no observation can be had: zeros

    seen = env.reset(options("hide", true));
    CHECK(is_cut(seen) && env.has_failed(seen, During::kReset, "bad observation"));
    seen = env.reset(options("throw", true));
    CHECK(is_cut(seen) && env.has_failed(seen, During::kReset, "bad reset"));
    seen = env.reset(options("throw", std::string("yes")));
    CHECK(is_cut(seen) && env.has_failed(seen, During::kReset, "'throw' must be True or False; got a string"));

    CHECK(is_first(env.reset(), 5));
    CHECK(is_step(env.step(Command::kGo, 13), 5, 1, 13));
    seen = env.step(Command::kEndAndThrowAtReset, 14);
    if (autoreset == Autoreset::kSameStep) {
      CHECK(is_cut(seen) && env.has_failed(seen, During::kAutoreset, "bad reset"));
      CHECK(seen.now.num_episodes() == 5 && seen.now.num_steps() == 2);
    } else {
      CHECK(is_step(seen, 5, 2, 14) && seen.terminated);
      seen = autoreset == Autoreset::kNextStep ? env.step(Command::kGo) : env.reset();
      const During during = autoreset == Autoreset::kNextStep ? During::kAutoreset : During::kReset;
      CHECK(is_cut(seen) && env.has_failed(seen, during, "bad reset"));
    }
    CHECK(is_first(env.reset(), 6));
    CHECK(is_step(env.step(Command::kGo, 15), 6, 1, 15));
  }
}

void partial_reset_repeats_the_others() {
  for (const Autoreset autoreset : {Autoreset::kNextStep, Autoreset::kSameStep, Autoreset::kDisabled}) {
    ScriptedPool<true> pool({.num_envs = 4, .num_threads = 2, .autoreset = autoreset});
    pool.reset();
    const auto before = pool.step({{Command::kGo, 1}, {Command::kTerminate, 2}, {Command::kGo, 3}});
    pool.pool->set_options(options("number", std::int64_t{77}));
    pool.pool->send_all({Op::kRepeat, Op::kRepeat, Op::kReset, Op::kRepeat}, 0);
    const auto rows = pool.receive();
    for (const std::size_t i : {0, 1, 3}) {
      CHECK(rows[i].now.facts == before[i].now.facts && rows[i].now.draws == before[i].now.draws);
      CHECK(rows[i].reward == 0 && !rows[i].terminated && !rows[i].truncated && rows[i].flags == kComplete);
      CHECK(rows[i].now.info_steps == -1);
    }
    CHECK(rows[2].now.number() == 77 && rows[2].now.num_episodes() == 2 && rows[2].now.info_steps == 0);
    CHECK(pool.pool->envs().has_ended(1) == (autoreset != Autoreset::kSameStep));  // to repeat changes nothing
  }
}

/// The owner may reset an env into a row it has received, of either line.
void reset_into_a_received_row() {
  ScriptedPool<true> pool({.num_envs = 400, .batch_size = 3});
  pool.reset();
  for (const std::uint8_t line : {0, 1}) {
    for (std::int32_t i = 0; i < 400; ++i) pool.set_action(i, {i == 1 ? Command::kThrow : Command::kGo, 50 + i});
    if (line == 0) {
      pool.send_all(Op::kStep);
    } else {
      pool.send({0, 1, 2}, 1);
    }
    CHECK(pool.pool->recv(line, patience()) == Waited::kReady);
    const BatchLine::Full full = pool.pool->take(line);
    CHECK(full.flags == kFailed);
    const Seen before[] = {pool.seen(line, full.buffer, 0), pool.seen(line, full.buffer, 2)};
    pool.pool->envs().rebuild(1);
    pool.pool->envs().reset_into(1, options("number", std::int64_t{99}), *pool.pool->store(line), full.buffer, 1);
    const Seen after = pool.seen(line, full.buffer, 1);
    CHECK(after.env_id == 1 && after.now.env_id() >= 400);  // another env than before
    CHECK(after.now.number() == 99 && after.now.num_episodes() == 1 && after.now.info_steps == 0);
    CHECK(pool.seen(line, full.buffer, 0) == before[0] && pool.seen(line, full.buffer, 2) == before[1]);
    CHECK(!pool.pool->envs().has_ended(1));
    pool.pool->store(line)->give_back(full.buffer);
  }
}

void a_restored_env_repeats_its_steps() {
  ScriptedPool<false> pool({.num_envs = 2, .max_episode_steps = 4});
  pool.reset();
  pool.step({{Command::kGo, 1}});
  EnvArray& envs = pool.pool->envs();
  std::vector<std::byte> state(envs.state_bytes());
  std::uint32_t num_steps = 0;
  Splitmix twin(123);
  Splitmix same_twin(123);
  envs.get_state(1, state.data(), &num_steps);
  CHECK(num_steps == 1);
  envs.set_generator(1, Random(twin.bitgen(), false));
  std::vector<Seen> rows;
  for (std::int32_t i = 0; i < 5; ++i) rows.push_back(pool.step({{Command::kGo, i}})[1]);
  CHECK(rows[2].truncated && is_first(rows[3], 2));
  envs.set_state(1, state.data(), num_steps);
  envs.set_ended(1, false);
  envs.set_generator(1, Random(same_twin.bitgen(), false));
  for (std::int32_t i = 0; i < 5; ++i) CHECK(pool.step({{Command::kGo, i}})[1] == rows[static_cast<std::size_t>(i)]);
}

}  // namespace

std::vector<Test> episode_tests() {
  return {
      {"episode: next-step autoreset, rows of envs", next_step_autoreset<0>},
      {"episode: next-step autoreset, claimed rows", next_step_autoreset<1>},
      {"episode: same-step autoreset, rows of envs", same_step_autoreset<0>},
      {"episode: same-step autoreset, claimed rows", same_step_autoreset<1>},
      {"episode: disabled autoreset, rows of envs", disabled_autoreset<0>},
      {"episode: disabled autoreset, claimed rows", disabled_autoreset<1>},
      {"episode: time limit, rows of envs", time_limit<0>},
      {"episode: time limit, claimed rows", time_limit<1>},
      {"episode: failures, rows of envs", failures<0>},
      {"episode: failures, claimed rows", failures<1>},
      {"episode: a partial reset repeats the others", partial_reset_repeats_the_others},
      {"episode: a reset into a received row, of either line", reset_into_a_received_row},
      {"episode: a restored env repeats its steps", a_restored_env_repeats_its_steps},
  };
}

}  // namespace envfleet::test
