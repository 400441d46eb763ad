// Blackjack: Gymnasium's.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/registry.h"

namespace envfleet {

struct Blackjack {
  struct Model {
    explicit Model(const Kwargs& kwargs) : natural(kwargs.flag("natural", false)), sab(kwargs.flag("sab", false)) {}

    static Spec spec() {
      return {.observation = Space::tuple({Space::discrete(32), Space::discrete(11), Space::discrete(2)}),
              .action = Space::discrete(2)};
    }

    bool natural;  // a natural that wins is worth 1.5
    bool sab;      // Sutton and Barto's rules: a natural beats everything but another
  };

  struct Hand {
    static constexpr std::size_t kMaxCards = 22;  // 21 aces and one more

    std::array<std::int8_t, kMaxCards> cards;  // the first num_cards; an ace is 1, a face 10
    std::int8_t num_cards;

    void draw(Random& random) {
      const auto card = static_cast<std::int8_t>(std::min<std::int64_t>(random.integers(13) + 1, 10));
      cards[static_cast<std::size_t>(num_cards++)] = card;
    }
    bool has_usable_ace() const { return has_ace() && low_sum() + 10 <= 21; }
    int sum() const { return low_sum() + (has_usable_ace() ? 10 : 0); }
    int score() const { return sum() > 21 ? 0 : sum(); }
    bool is_natural() const { return num_cards == 2 && has_ace() && low_sum() == 11; }

   private:
    const std::int8_t* end() const { return cards.data() + num_cards; }
    bool has_ace() const { return std::find(cards.data(), end(), 1) != end(); }
    int low_sum() const {
      int sum = 0;
      for (const std::int8_t* card = cards.data(); card != end(); ++card) sum += *card;
      return sum;
    }
  };

  struct State {
    Hand player, dealer;
    std::int8_t shown_suit;  // of the dealer's first card: clubs, diamonds, hearts, spades
    std::int8_t shown_face;  // if it counts 10: jack, queen, king
  };

  explicit Blackjack(const Model& shared) : model(&shared) {}

  void reset(Random& random, const Kwargs&) {
    state = {};
    for (Hand* hand : {&state.dealer, &state.player}) {
      hand->draw(random);
      hand->draw(random);
    }
    state.shown_suit = static_cast<std::int8_t>(random.integers(4));
    if (state.dealer.cards[0] == 10) state.shown_face = static_cast<std::int8_t>(random.integers(3));
  }

  Outcome step(Action action, Random& random) {
    if (action.discrete() == 1) {
      state.player.draw(random);
      const bool is_bust = state.player.sum() > 21;
      return {.reward = is_bust ? -1.0 : 0.0, .terminated = is_bust};
    }
    while (state.dealer.sum() < 17) state.dealer.draw(random);
    return {.reward = payout(), .terminated = true};
  }

  void observe(Obs obs) const {
    *obs.leaf<std::int64_t>(0) = state.player.sum();
    *obs.leaf<std::int64_t>(1) = state.dealer.cards[0];
    *obs.leaf<std::int64_t>(2) = state.player.has_usable_ace();
  }

  const Model* model;
  State state{};

 private:
  double payout() const {
    const int lead = state.player.score() - state.dealer.score();
    if (state.player.is_natural()) {
      if (model->sab && !state.dealer.is_natural()) return 1.0;
      if (!model->sab && model->natural && lead > 0) return 1.5;
    }
    return lead > 0 ? 1.0 : lead < 0 ? -1.0 : 0.0;
  }
};

ENVFLEET_ENV("Blackjack", Blackjack);

}  // namespace envfleet
