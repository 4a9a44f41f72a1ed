// Turns: exactly one tenant goes on, in every pause another one may, and the state of the process follows.
#include "csrc/base/device_turns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <iterator>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/base/errors.h"
#include "tests/cpp/support.h"

namespace hydra {
namespace {

using test::Gate;
using Tenant = DeviceTurns::Tenant;
using Pair = std::pair<std::optional<Tenant>, Tenant>;

/// Turns that note each switch, which only the tenant with the turn makes.
class NotedTurns {
 public:
  DeviceTurns* operator->() { return &turns_; }
  DeviceTurns& get() { return turns_; }
  const std::vector<Pair>& switches() const { return switches_; }
  std::vector<Tenant> order() const {
    std::vector<Tenant> found;
    for (const Pair& pair : switches_) {
      found.push_back(pair.second);
    }
    return found;
  }

 private:
  std::vector<Pair> switches_;
  DeviceTurns turns_{[this](std::optional<Tenant> from, Tenant to) { switches_.emplace_back(from, to); }};
};

/// Uses the tenant's turn until it has computed for so many seconds more.
void compute(const DeviceTurns& turns, Tenant tenant, double seconds) {
  const double until = turns.computed(tenant) + seconds;
  while (turns.computed(tenant) < until) {
  }
}

constexpr double kBehind = 5 * DeviceTurns::kAffinity;
constexpr double kPatience = 20.0;  // seconds, long enough for any test

/// Tenants of which each does its work once all have arrived. Those that have no turn then wait in an offer, so it is
/// known who waits.
class Crew {
 public:
  using Work = std::function<void(Tenant)>;

  Crew(NotedTurns& turns, std::size_t count) : turns_(turns) {
    for (std::size_t i = 0; i < count; ++i) {
      tenants_.push_back(turns->admit());
    }
  }

  void work(const Work& work) {
    std::vector<std::jthread> threads;
    for (const Tenant tenant : tenants_) {
      threads.emplace_back([this, tenant, &work] {
        turns_->enter(tenant);
        ++arrived_;
        while (arrived_ < tenants_.size()) {
          DeviceTurns::offer();
          if (turns_->computed(tenant) > kPatience) {
            ADD_FAILURE() << "tenant " << tenant << " offered its turn, and it was not taken";
            const Pause pause;
          }
        }
        work(tenant);
        turns_->leave();
      });
    }
  }

  /// The tenants but this one: who has computed the least comes first.
  std::vector<Tenant> others(Tenant tenant) const {
    std::vector<Tenant> found;
    std::ranges::copy_if(tenants_, std::back_inserter(found), [=](Tenant each) { return each != tenant; });
    std::ranges::sort(found, {}, [this](Tenant each) { return turns_.get().computed(each); });
    return found;
  }

 private:
  NotedTurns& turns_;
  std::vector<Tenant> tenants_;
  std::size_t arrived_ = 0;  // the turn guards it
};

// ---- mutual exclusion -------------------------------------------------------------------------

TEST(DeviceTurns, ExactlyOneTenantGoesOnHoweverTheyPause) {
  constexpr int kTenants = 8;
  NotedTurns turns;
  std::vector<Tenant> tenants;
  for (int i = 0; i < kTenants; ++i) {
    tenants.push_back(turns->admit());
  }
  std::atomic<int> going_on{0};
  std::atomic<int> most{0};
  std::int64_t unguarded = 0;  // the turn guards it, as it does the state of the process
  const auto work = [&](Tenant tenant) {
    turns->enter(tenant);
    std::mt19937 random(static_cast<std::uint32_t>(tenant));
    for (int i = 0; i < 300; ++i) {
      most = std::max(most.load(), ++going_on);
      ++unguarded;
      --going_on;
      switch (random() % 4) {
        case 0:
          DeviceTurns::offer();
          break;
        case 1: {
          const Undisturbed undisturbed;
          const Pause pause;
          ++unguarded;
          break;
        }
        default: {
          const Pause pause;
          const Pause inner;
          std::this_thread::yield();
        }
      }
    }
    turns->leave();
  };
  {
    std::vector<std::jthread> threads;
    for (const Tenant tenant : tenants) {
      threads.emplace_back(work, tenant);
    }
  }
  EXPECT_EQ(most.load(), 1);
  EXPECT_GE(unguarded, kTenants * 300);
  EXPECT_EQ(turns->switches(), static_cast<std::int64_t>(turns.switches().size()) - 1);
}

TEST(DeviceTurns, EachSwitchNamesTheTenantBefore) {
  NotedTurns turns;
  const std::vector<Tenant> tenants = {turns->admit(), turns->admit(), turns->admit()};
  {
    std::vector<std::jthread> threads;
    for (const Tenant tenant : tenants) {
      threads.emplace_back([&turns, tenant] {
        turns->enter(tenant);
        for (int i = 0; i < 100; ++i) {
          const Pause pause;
        }
        turns->leave();
      });
    }
  }
  const std::vector<Pair>& switches = turns.switches();
  EXPECT_EQ(switches.front().first, std::nullopt);
  for (std::size_t i = 1; i < switches.size(); ++i) {
    EXPECT_EQ(switches[i].first, switches[i - 1].second);
    EXPECT_NE(switches[i].first, switches[i].second);
  }
}

TEST(DeviceTurns, ATenantThatComesBackToItsOwnStateSwitchesNothing) {
  NotedTurns turns;
  const Tenant only = turns->admit();
  turns->admit();
  for (int i = 0; i < 3; ++i) {
    turns->enter(only);
    {
      const Pause pause;
    }
    DeviceTurns::offer();
    turns->leave();
  }
  EXPECT_EQ(turns.switches(), (std::vector<Pair>{{std::nullopt, only}}));
  EXPECT_EQ(turns->switches(), 0);
}

// ---- who goes on ------------------------------------------------------------------------------

TEST(DeviceTurns, OfThoseThatWaitTheOneThatComputedLeastGoesOn) {
  NotedTurns turns;
  Crew crew(turns, 5);
  std::vector<Tenant> expected;
  std::vector<Tenant> order;
  crew.work([&](Tenant tenant) {
    if (order.empty()) {
      expected = crew.others(tenant);
      expected.insert(expected.begin(), tenant);
    }
    order.push_back(tenant);
  });
  EXPECT_EQ(order, expected);
}

TEST(DeviceTurns, AnOfferIsTakenByTheOneThatComputedLeastIfItIsBehindByMoreThanTheAffinity) {
  struct Offer {
    Tenant giver;
    Tenant receiver;
    double least;  // what the giver must have computed
  };
  NotedTurns turns;
  Crew crew(turns, 3);
  int rounds = 0;
  int taken = 0;
  int refused = 0;
  std::optional<Offer> offer;
  crew.work([&](Tenant tenant) {
    while (rounds < 60) {
      if (offer) {
        EXPECT_EQ(tenant, offer->receiver);
        EXPECT_GT(turns->computed(offer->giver), offer->least);
        ++taken;
      }
      const Tenant receiver = crew.others(tenant).front();
      const double present = turns->computed(receiver);
      const double ahead = rounds++ % 2 == 0 ? kBehind : DeviceTurns::kAffinity / 4;
      compute(turns.get(), tenant, present + ahead - turns->computed(tenant));
      const double least = present + DeviceTurns::kAffinity;
      offer = Offer{.giver = tenant, .receiver = receiver, .least = least};
      const double computed = turns->computed(tenant);
      const std::int64_t before = turns->switches();
      DeviceTurns::offer();
      if (turns->switches() == before) {
        EXPECT_LE(computed, least);
        offer.reset();
        ++refused;
      }
    }
    offer.reset();
  });
  EXPECT_GT(taken, 0);
  EXPECT_GE(taken + refused, rounds - 1);  // the last one ends the work
}

TEST(DeviceTurns, ATenantInAPauseHasComputedNothingMore) {
  NotedTurns turns;
  Crew crew(turns, 2);
  bool first = true;
  crew.work([&](Tenant tenant) {
    const Tenant other = crew.others(tenant).front();
    if (std::exchange(first, false)) {
      const Pause pause;  // the other one leaves before this one is back
    } else {
      const double computed = turns->computed(other);
      const double own = turns->computed(tenant);
      compute(turns.get(), tenant, kBehind);
      EXPECT_EQ(turns->computed(other), computed);
      EXPECT_GE(turns->computed(tenant), own + kBehind);
    }
  });
}

TEST(DeviceTurns, ATenantThatIsAboutToWakeUpHasComputedNothingYet) {
  for (int i = 0; i < 100; ++i) {
    NotedTurns turns;
    const Tenant one = turns->admit();
    const Tenant other = turns->admit();
    Gate arrives;
    turns->enter(one);
    std::jthread thread([&] {
      arrives.open();
      turns->enter(other);
      turns->leave();
    });
    arrives.wait();
    compute(turns.get(), one, DeviceTurns::kAffinity / 4);  // meanwhile the other one begins to wait
    turns->leave();
    EXPECT_LT(turns->computed(other), kPatience);
  }
}

// ---- pauses -----------------------------------------------------------------------------------

TEST(DeviceTurns, APauseInsideAPauseWaitsForNoTurn) {
  NotedTurns turns;
  const Tenant one = turns->admit();
  const Tenant other = turns->admit();
  Gate other_has_it;
  Gate inner_ended;
  turns->enter(one);
  std::jthread thread([&] {
    turns->enter(other);
    other_has_it.open();
    EXPECT_TRUE(inner_ended.opens());
    turns->leave();
  });
  {
    const Pause pause;
    other_has_it.wait();
    {
      const Pause inner;
    }
    DeviceTurns::offer();
    inner_ended.open();
  }
  EXPECT_EQ(turns.order(), (std::vector<Tenant>{one, other, one}));
  turns->leave();
}

TEST(DeviceTurns, AnUndisturbedTenantKeepsItsTurn) {
  NotedTurns turns;
  Crew crew(turns, 2);
  bool first = true;
  crew.work([&](Tenant tenant) {
    if (!std::exchange(first, false)) {
      return;
    }
    const Tenant other = crew.others(tenant).front();
    // The other one may have computed for long before this one arrived.
    compute(turns.get(), tenant, turns->computed(other) + kBehind - turns->computed(tenant));
    const std::int64_t before = turns->switches();
    {
      const Undisturbed undisturbed;
      {
        const Undisturbed inner;
      }
      {
        const Pause pause;
      }
      DeviceTurns::offer();
    }
    EXPECT_EQ(turns->switches(), before);
    DeviceTurns::offer();
    EXPECT_EQ(turns->switches(), before + 2);  // there and back
  });
}

TEST(DeviceTurns, APauseOfAThreadThatTookOverTheSeatPassesTheTurnOn) {
  NotedTurns turns;
  const Tenant one = turns->admit();
  const Tenant other = turns->admit();
  Gate other_was_there;
  turns->enter(one);
  std::jthread others([&] {
    turns->enter(other);
    other_was_there.open();
    turns->leave();
  });
  std::jthread helper([&, seat = DeviceTurns::seat()] {
    EXPECT_EQ(DeviceTurns::seat().turns, nullptr);
    DeviceTurns::take_over(seat);
    const Pause pause;
    EXPECT_TRUE(other_was_there.opens());
  });
  helper.join();
  EXPECT_EQ(turns.order(), (std::vector<Tenant>{one, other, one}));
  turns->leave();
}

TEST(DeviceTurns, AThreadWithoutASeatIsUntouched) {
  NotedTurns turns;
  const Tenant only = turns->admit();
  Gate has_it;
  Gate go;
  std::jthread thread([&] {
    turns->enter(only);
    has_it.open();
    EXPECT_TRUE(go.opens());
    turns->leave();
  });
  has_it.wait();
  {
    const Pause pause;
    const Undisturbed undisturbed;
    DeviceTurns::offer();
  }
  DeviceTurns::offer();
  EXPECT_EQ(DeviceTurns::seat().turns, nullptr);
  EXPECT_EQ(turns->switches(), 0);
  go.open();
}

TEST(WaitInPause, DoesNotPauseIfTheConditionHolds) {
  NotedTurns turns;
  Crew crew(turns, 2);
  bool first = true;
  crew.work([&](Tenant) {
    if (std::exchange(first, false)) {
      const std::int64_t before = turns->switches();
      std::mutex mutex;
      std::condition_variable changed;
      std::unique_lock lock(mutex);
      wait_in_pause(lock, changed, [] { return true; });
      EXPECT_TRUE(lock.owns_lock());
      EXPECT_EQ(turns->switches(), before);
    }
  });
}

TEST(WaitInPause, EndsOnceTheConditionHoldsInTheTenantsOwnTurn) {
  for (int i = 0; i < 50; ++i) {
    NotedTurns turns;
    Crew crew(turns, 2);
    std::mutex mutex;
    std::condition_variable changed;
    bool ready = false;
    bool first = true;
    const auto set = [&](bool value) {
      {
        const std::lock_guard lock(mutex);  // free, though the other one may wait for its turn
        ready = value;
      }
      changed.notify_all();
    };
    crew.work([&](Tenant) {
      if (std::exchange(first, false)) {
        std::unique_lock lock(mutex);
        wait_in_pause(lock, changed, [&] { return ready; });
        EXPECT_TRUE(lock.owns_lock());
        EXPECT_TRUE(ready);
      } else {
        set(true);
        set(false);
        {
          const Pause pause;
        }
        set(true);
      }
    });
  }
}

// ---- seats ------------------------------------------------------------------------------------

TEST(DeviceTurns, ASeatIsTakenAndLeftOnce) {
  NotedTurns turns;
  NotedTurns others;
  const Tenant tenant = turns->admit();
  const Tenant elsewhere = others->admit();
  EXPECT_THROW(turns->leave(), StateError);
  EXPECT_THROW(turns->enter(tenant + 1), StateError);
  turns->enter(tenant);
  EXPECT_THROW(turns->enter(tenant), StateError);
  EXPECT_THROW(others->enter(elsewhere), StateError);
  EXPECT_THROW(others->leave(), StateError);
  turns->leave();
  EXPECT_THROW(turns->leave(), StateError);
  others->enter(elsewhere);
  others->leave();
}

}  // namespace
}  // namespace hydra
