#include "csrc/schedule/recipe.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "csrc/base/errors.h"
#include "csrc/schedule/action.h"

namespace hydra::schedule {

namespace {

constexpr std::array<std::pair<const char*, RecipeKind>, 5> kKinds = {{
    {"gpipe", RecipeKind::kGpipe},
    {"1f1b", RecipeKind::kOneForwardOneBackward},
    {"interleaved", RecipeKind::kInterleaved},
    {"2bw", RecipeKind::kTwoBufferedWeights},
    {"pipedream", RecipeKind::kPipedream},
}};

RecipeKind kind_named(std::string_view name) {
  std::string names;
  for (const auto& [known, kind] : kKinds) {
    if (name == known) {
      return kind;
    }
    names += (names.empty() ? "'" : ", '") + std::string(known) + "'";
  }
  throw InvalidSchedule("there is no schedule '" + std::string(name) + "'; the built-in ones are " + names +
                        "; give any other as its text");
}

/// The rank's stages one after another; each takes a whole group of microbatches before the next stage begins.
RankOrder grouped(const Recipe& recipe, int rank, int microbatches, int group) {
  RankOrder order;
  const int chunks = recipe.stages_per_rank();
  for (int first = 0; first < microbatches; first += group) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int microbatch = first; microbatch < first + group; ++microbatch) {
        order.forwards.push_back({chunk * recipe.ranks + rank, microbatch});
        order.backwards.push_back({(chunks - 1 - chunk) * recipe.ranks + rank, microbatch});
      }
    }
  }
  return order;
}

}  // namespace

Recipe Recipe::named(std::string_view kind, int stages, int ranks, int microbatches, bool vertical_sync, int ahead) {
  const Recipe recipe{kind_named(kind), stages, ranks, microbatches, vertical_sync, ahead};
  recipe.check();
  return recipe;
}

const char* Recipe::name() const noexcept {
  return std::ranges::find(kKinds, kind, &std::pair<const char*, RecipeKind>::second)->first;
}

void Recipe::check() const {
  const std::string asked = std::string(name()) + " with stages=" + std::to_string(stages) +
                            ", ranks=" + std::to_string(ranks) + ", microbatches=" + std::to_string(microbatches) +
                            (ahead == 0 ? "" : ", ahead=" + std::to_string(ahead)) + ": ";
  const auto expect = [&](bool condition, const std::string& problem) {
    HYDRA_EXPECT(condition, InvalidSchedule, asked + problem);
  };
  expect(stages >= 1 && ranks >= 1 && microbatches >= 1, "each must be at least 1");
  expect(
      stages <= kMostStages && microbatches <= kMostMicrobatches,
      "at most " + std::to_string(kMostStages) + " stages and " + std::to_string(kMostMicrobatches) + " microbatches");
  expect(stages % ranks == 0, "stages must be a multiple of ranks, so that every rank has as many");
  expect(!vertical_sync || kind == RecipeKind::kPipedream, "vertical_sync is an option of 'pipedream' only");
  expect(ahead >= 0 && ahead <= kMostMicrobatches, "ahead must be 0 to " + std::to_string(kMostMicrobatches));
  const bool can_be_ahead = kind == RecipeKind::kOneForwardOneBackward || kind == RecipeKind::kTwoBufferedWeights;
  expect(ahead == 0 || (can_be_ahead && stages == ranks),
         "ahead is an option of '1f1b' and '2bw' with one stage a rank only");
  switch (kind) {
    case RecipeKind::kGpipe:
      return;
    case RecipeKind::kOneForwardOneBackward:
      return expect(stages == ranks, "it has one stage a rank; 'interleaved' is its form with more");
    case RecipeKind::kInterleaved:
      return expect(stages > ranks, "it has two or more stages a rank; '1f1b' is its form with one");
    case RecipeKind::kTwoBufferedWeights:
      return expect(microbatches >= sent_on(0),
                    "two versions of the weights are enough only for (ranks - 1) * (1 + ahead) microbatches or more: "
                    "give at least " +
                        std::to_string(sent_on(0)) + ", or use fewer ranks, or '1f1b'");
    case RecipeKind::kPipedream:
      expect(stages == ranks, "it has one stage a rank");
      return expect(microbatches == 1, "it updates after every microbatch, so a batch is one: microbatches=1");
  }
}

VersionRule Recipe::rule() const noexcept {
  switch (kind) {
    case RecipeKind::kTwoBufferedWeights:
      return VersionRule::kDelayed;
    case RecipeKind::kPipedream:
      return vertical_sync ? VersionRule::kVerticalSync : VersionRule::kStashing;
    default:
      return VersionRule::kFlush;
  }
}

void Recipe::check_batch(int batch_microbatches) const {
  HYDRA_EXPECT(batch_microbatches >= 1 && batch_microbatches <= kMostMicrobatches, InvalidSchedule,
               std::string(name()) + ": a batch of " + std::to_string(batch_microbatches) +
                   " microbatches; give 1 to " + std::to_string(kMostMicrobatches));
  const bool fixed = kind == RecipeKind::kPipedream || (kind == RecipeKind::kTwoBufferedWeights && stages > ranks);
  HYDRA_EXPECT(!fixed || batch_microbatches == microbatches, InvalidSchedule,
               std::string(name()) + " with " + std::to_string(stages_per_rank()) + " stage(s) a rank: a batch of " +
                   std::to_string(batch_microbatches) + " microbatches; give " + std::to_string(microbatches) +
                   ", which the schedule was made for");
}

int Recipe::sent_on(int rank) const noexcept { return (ranks - 1 - rank) * (1 + ahead); }

RankOrder Recipe::order(int rank, int batch_microbatches) const {
  const int chunks = stages_per_rank();
  if (kind == RecipeKind::kInterleaved) {
    // A last group that is not full follows the order of a full one without the missing microbatches. Leaving out all
    // turns of a microbatch removes waits and adds none.
    RankOrder order = grouped(*this, rank, batch_microbatches, ranks);
    order.in_flight = (chunks - 1) * ranks + 2 * sent_on(rank);
    return order;
  }
  RankOrder order = grouped(*this, rank, batch_microbatches, batch_microbatches);
  order.in_flight = kind == RecipeKind::kGpipe ? kUnlimited : (chunks - 1) * batch_microbatches + sent_on(rank);
  return order;
}

}  // namespace hydra::schedule
