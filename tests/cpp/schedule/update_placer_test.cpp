#include "csrc/schedule/update_placer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/schedule/stream.h"
#include "csrc/schedule/verifier.h"
#include "tests/cpp/schedule/support.h"

namespace hydra::schedule {
namespace {

using test::made;
using test::message_of;
using test::words;

Actions without_begins(Actions actions) {
  std::erase_if(actions, [](const Action& action) { return action.kind == ActionKind::kBeginUpdate; });
  return actions;
}

/// Whether `found` is true for any of `actions` from `begin` on.
template <typename Found>
bool any_from(const Actions& actions, std::size_t begin, const Found& found) {
  return std::any_of(actions.begin() + static_cast<std::ptrdiff_t>(begin), actions.end(), found);
}

/// Whether the update `end` may begin right before the action at `place`. Derived from the memory contents of a rank
/// with all stages, without the rules of the pass.
bool is_legal(const Schedule& schedule, const Actions& actions, const Action& end, std::size_t place) {
  const std::size_t ends = index(std::ranges::find(actions, end) - actions.begin());
  if (place > ends) {
    return false;
  }
  if (schedule.buffers(end.stage) == 1) {
    return place == ends;
  }
  const std::int64_t overwritten = end.batch + 1 - schedule.buffers(end.stage);
  return !any_from(actions, place, [&](const Action& later) {
    const bool sums = later.kind == ActionKind::kReduce && later.batch == end.batch;
    const bool makes_its_input =
        later.kind == ActionKind::kFinishUpdate && later.stage == end.stage && later.batch < end.batch;
    const bool reads = is_compute(later.kind) && later.stage == end.stage &&
                       schedule.version_of(later.stage, later.batch) <= overwritten;
    return sums || makes_its_input || reads;
  });
}

/// All orders of the actions of whole batches that the verifier accepts, on one rank with all stages.
class Orders {
 public:
  Orders(int stages, int microbatches, int batches, VersionRule rule) : schedule_(plain(stages, microbatches, rule)) {
    for (int batch = 0; batch < batches; ++batch) {
      for (int stage = 0; stage < stages; ++stage) {
        for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
          left_.push_back({ActionKind::kForward, stage, batch, microbatch});
          left_.push_back({ActionKind::kBackward, stage, batch, microbatch});
        }
        left_.push_back({ActionKind::kReduce, stage, batch, 0});
        left_.push_back({ActionKind::kFinishUpdate, stage, batch, 0});
      }
    }
    taken_.assign(left_.size(), false);
  }

  const Schedule& schedule() const noexcept { return schedule_; }

  template <typename Visit>
  void visit(const Visit& visit) {
    if (order_.size() == left_.size()) {
      return visit(order_);
    }
    for (std::size_t at = 0; at < left_.size(); ++at) {
      if (!taken_[at] && ready(left_[at])) {
        taken_[at] = true;
        order_.push_back(left_[at]);
        this->visit(visit);
        order_.pop_back();
        taken_[at] = false;
      }
    }
  }

  /// Draws one order at random.
  Actions draw(std::mt19937& dice) {
    order_.clear();
    while (order_.size() < left_.size()) {
      Actions next;
      std::ranges::copy_if(left_, std::back_inserter(next),
                           [&](const Action& action) { return !done(action) && ready(action); });
      order_.push_back(next[std::uniform_int_distribution<std::size_t>(0, next.size() - 1)(dice)]);
    }
    return std::exchange(order_, {});
  }

 private:
  static Schedule plain(int stages, int microbatches, VersionRule rule) {
    Actions body;
    for (int stage = 0; stage < stages; ++stage) {
      body.push_back({ActionKind::kForward, stage, 0, 0});
    }
    return Schedule(stages, microbatches, rule, {body});
  }

  bool done(const Action& action) const { return std::ranges::find(order_, action) != order_.end(); }

  /// Whether the action may come next. Microbatches come in their order, so that no two orders differ by numbers alone.
  bool ready(const Action& action) const {
    const auto [kind, stage, batch, microbatch] = action;
    const auto has = [&](ActionKind other, int of_stage, std::int64_t of_batch, int of_microbatch) {
      return done({other, of_stage, of_batch, of_microbatch});
    };
    switch (kind) {
      case ActionKind::kForward: {
        const std::int64_t version = schedule_.version_of(stage, batch);
        return (version == 0 || has(ActionKind::kFinishUpdate, stage, version - 1, 0)) &&
               (stage == 0 || has(kind, stage - 1, batch, microbatch)) &&
               (microbatch == 0 || has(kind, stage, batch, microbatch - 1));
      }
      case ActionKind::kBackward:
        return has(ActionKind::kForward, stage, batch, microbatch) &&
               (stage + 1 == schedule_.stages() || has(kind, stage + 1, batch, microbatch)) &&
               (microbatch == 0 || has(kind, stage, batch, microbatch - 1)) &&
               (batch == 0 || has(ActionKind::kReduce, stage, batch - 1, 0));
      case ActionKind::kReduce:
        return has(ActionKind::kBackward, stage, batch, schedule_.microbatches() - 1);
      default:
        for (int other = 0; other < schedule_.stages(); ++other) {
          if (!has(ActionKind::kReduce, other, batch, 0)) {
            return false;
          }
        }
        return batch == 0 || has(kind, stage, batch - 1, 0);
    }
  }

  Schedule schedule_;
  Actions left_;
  std::vector<bool> taken_;
  Actions order_;
};

/// The index, without begins, of the action before which the pass has put the begin of the update `end`.
std::size_t place_of(const Actions& placed, Action end) {
  end.kind = ActionKind::kBeginUpdate;
  EXPECT_EQ(std::ranges::count(placed, end), 1) << in_words(end);
  return without_begins({placed.begin(), std::ranges::find(placed, end)}).size();
}

bool is_accepted(const Schedule& schedule, const Actions& actions, int batches) {
  return message_of<InvalidSchedule>(
             [&] { verify(schedule, {actions}, std::vector<int>(index(batches), schedule.microbatches())); })
      .empty();
}

void expect_first_places(const Schedule& schedule, const Actions& order, const Actions& placed) {
  for (const Action& end : order) {
    if (end.kind == ActionKind::kFinishUpdate) {
      std::size_t first = 0;
      while (!is_legal(schedule, order, end, first)) {
        ++first;
      }
      EXPECT_EQ(place_of(placed, end), first) << in_words(end) << " in " << words(placed);
    }
  }
}

struct Case {
  int stages;
  int microbatches;
  int batches;
  VersionRule rule;
  int orders;  // the number of orders
};

class EveryOrder : public testing::TestWithParam<Case> {};

TEST_P(EveryOrder, HasItsUpdatesBegunAtTheFirstPlaceThatIsLegal) {
  const Case& tried = GetParam();
  Orders orders(tried.stages, tried.microbatches, tried.batches, tried.rule);
  const Schedule& schedule = orders.schedule();
  int seen = 0;
  orders.visit([&](const Actions& order) {
    ++seen;
    const Actions placed = UpdatePlacer(schedule, 0, 0).place(order);
    EXPECT_EQ(without_begins(placed), order);
    EXPECT_TRUE(is_accepted(schedule, placed, tried.batches)) << words(placed);
    expect_first_places(schedule, order, placed);
    const std::size_t cut = index(seen) % (order.size() + 1);  // two calls have to give the same
    UpdatePlacer placer(schedule, 0, 0);
    Actions parts = placer.place({order.begin(), order.begin() + static_cast<std::ptrdiff_t>(cut)});
    const Actions rest = placer.place({order.begin() + static_cast<std::ptrdiff_t>(cut), order.end()});
    parts.insert(parts.end(), rest.begin(), rest.end());
    EXPECT_EQ(parts, placed);
  });
  EXPECT_EQ(seen, tried.orders);
}

/// Moves each begin to every place. The verifier has to accept it exactly where it is legal.
TEST_P(EveryOrder, IsVerifiedWithABeginWhereItIsLegalAndNowhereElse) {
  const Case& tried = GetParam();
  Orders orders(tried.stages, tried.microbatches, tried.batches, tried.rule);
  const Schedule& schedule = orders.schedule();
  int seen = 0;
  orders.visit([&](const Actions& order) {
    if (seen++ % (1 + tried.orders / 400) != 0) {
      return;
    }
    const Actions placed = UpdatePlacer(schedule, 0, 0).place(order);
    for (const Action& end : order) {
      if (end.kind != ActionKind::kFinishUpdate) {
        continue;
      }
      Action begin = end;
      begin.kind = ActionKind::kBeginUpdate;
      Actions missing = placed;
      std::erase(missing, begin);
      EXPECT_FALSE(is_accepted(schedule, missing, tried.batches)) << words(missing);
      for (std::size_t at = 0; at <= missing.size(); ++at) {
        Actions moved = missing;
        moved.insert(moved.begin() + static_cast<std::ptrdiff_t>(at), begin);
        const std::size_t place = place_of(moved, end);
        // Nothing may stand between the begin and the end of an update in place, not even this begin.
        const bool splits = at > 0 && at < missing.size() && missing[at - 1].kind == ActionKind::kBeginUpdate &&
                            schedule.buffers(missing[at - 1].stage) == 1;
        EXPECT_EQ(
            is_accepted(schedule, moved, tried.batches),
            is_legal(schedule, order, end, place) && !splits && (schedule.buffers(end.stage) > 1 || missing[at] == end))
            << words(moved);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Placer, EveryOrder,
    testing::Values(Case{1, 1, 4, VersionRule::kDelayed, 757}, Case{1, 2, 3, VersionRule::kDelayed, 10688},
                    Case{2, 1, 2, VersionRule::kFlush, 54}, Case{2, 1, 2, VersionRule::kDelayed, 29916},
                    Case{2, 1, 2, VersionRule::kStashing, 1116}, Case{3, 1, 1, VersionRule::kVerticalSync, 90}));

/// Draws orders at random, since with more than two versions there are too many.
TEST(Placer, BeginsAtTheFirstLegalPlaceOfRandomOrders) {
  std::mt19937 dice(5);
  for (const VersionRule rule : {VersionRule::kStashing, VersionRule::kVerticalSync}) {
    for (int trial = 0; trial < 500; ++trial) {
      Orders orders(3, 2, 4, rule);
      const Actions order = orders.draw(dice);
      expect_first_places(orders.schedule(), order, UpdatePlacer(orders.schedule(), 0, 0).place(order));
    }
  }
}

TEST(Placer, BeginsOnAllStagesOfARankOnceTheLastIsReduced) {
  const Schedule schedule = made("2bw", 4, 2, 2);
  const Actions actions = unroll(schedule, 2)[0];
  EXPECT_EQ(words(without_begins(actions)).find("BU"), std::string::npos);
  EXPECT_NE(words(actions).find("R0 BU0 BU2"), std::string::npos) << words(actions);
}

TEST(Placer, BeginsAnUpdateInPlaceRightBeforeItsEnd) {
  for (const Schedule& schedule : {made("1f1b", 2, 2, 3), made("interleaved", 4, 2, 4), made("gpipe", 4, 2, 3)}) {
    for (const Actions& actions : unroll(schedule, 3)) {
      for (std::size_t at = 0; at < actions.size(); ++at) {
        if (actions[at].kind == ActionKind::kFinishUpdate) {
          Action begin = actions[at];
          begin.kind = ActionKind::kBeginUpdate;
          EXPECT_EQ(actions[at - 1], begin);
        }
      }
    }
  }
}

TEST(Placer, GoesOnWhereADrainHasLeftOff) {
  const Schedule schedule = made("2bw", 1, 1, 1);
  Stream stream(schedule, 0, 5);
  EXPECT_EQ(stream.next_batch(1).back(), (Action{ActionKind::kBeginUpdate, 0, 5, 0}));
}

TEST(Placer, LeavesBeginsThatAreWrittenWhereTheyAre) {
  const Schedule schedule = parse(
      "hydra-schedule 1 stages=1 ranks=1 microbatches=2 versions=delay-1\n"
      "rank 0: U0-2 F0.0 BU0-1 B0.0 F0.1 B0.1 R0");
  EXPECT_EQ(message_of<InvalidSchedule>([&] { verify(schedule); }), "");
  EXPECT_EQ(words(unroll(schedule, 1)[0]), "F0.0 B0.0 F0.1 B0.1 R0 BU0 U0");
}

}  // namespace
}  // namespace hydra::schedule
