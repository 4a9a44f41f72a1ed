#include "csrc/pytorch/stash/treatment.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>
#include <vector>

namespace hydra {

namespace {

struct Scope {
  StashIdentity stash = 0;
  std::uint64_t key = 0;
  TreatmentPtr treatment;
  std::int32_t part = kNoPart;
};

thread_local std::vector<Scope> scopes;

std::uint64_t new_key() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return ++last;
}

bool asks_operators(const Scope& scope) noexcept { return scope.treatment && scope.treatment->asks_operators(); }

}  // namespace

StashScope::StashScope(StashIdentity stash, TreatmentPtr treatment, std::int32_t part) noexcept
    : stash_(stash), key_(new_key()), treatment_(std::move(treatment)), part_(part) {}

void StashScope::begin() const {
  Scope scope{stash_, key_, treatment_, part_};
  if (asks_operators(scope)) {
    begin_following_operators();
  }
  scopes.push_back(std::move(scope));
}

void StashScope::end() const noexcept {
  const auto last = std::find_if(scopes.rbegin(), scopes.rend(), [&](const Scope& scope) { return scope.key == key_; });
  if (last == scopes.rend()) {
    return;
  }
  if (last == scopes.rbegin() && !asks_operators(*last)) {
    scopes.pop_back();
    return;
  }
  const auto first = std::prev(last.base());
  const auto ended =
      std::stable_partition(first, scopes.end(), [&](const Scope& scope) { return scope.stash != stash_; });
  for (auto scope = ended; scope != scopes.end(); ++scope) {
    if (asks_operators(*scope)) {
      end_following_operators();
    }
  }
  scopes.erase(ended, scopes.end());
}

const Treatment& current_treatment(StashIdentity stash) noexcept {
  static const Treatment none;
  const auto found = std::find_if(scopes.rbegin(), scopes.rend(),
                                  [stash](const Scope& scope) { return scope.stash == stash && scope.treatment; });
  return found == scopes.rend() ? none : *found->treatment;
}

std::int32_t current_part(StashIdentity stash) noexcept {
  const auto found = std::find_if(scopes.rbegin(), scopes.rend(), [stash](const Scope& scope) {
    return scope.stash == stash && scope.part != kNoPart;
  });
  return found == scopes.rend() ? kNoPart : found->part;
}

}  // namespace hydra
