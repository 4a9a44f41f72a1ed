#include "csrc/pytorch/stash/treatment.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace hydra {

namespace {

struct Scope {
  StashIdentity stash = 0;
  ScopeKey key = 0;
  TreatmentPtr treatment;
  std::int32_t part = kNoPart;
};

thread_local std::vector<Scope> scopes;

bool asks_operators(const Scope& scope) noexcept { return scope.treatment && scope.treatment->asks_operators(); }

}  // namespace

void begin_scope(StashIdentity stash, ScopeKey key, TreatmentPtr treatment, std::int32_t part) {
  Scope scope{stash, key, std::move(treatment), part};
  if (asks_operators(scope)) {
    begin_following_operators();
  }
  scopes.push_back(std::move(scope));
}

void end_scope(StashIdentity stash, ScopeKey key) noexcept {
  const auto last = std::find_if(scopes.rbegin(), scopes.rend(),
                                 [&](const Scope& scope) { return scope.stash == stash && scope.key == key; });
  if (last == scopes.rend()) {
    return;
  }
  const auto first = std::prev(last.base());
  const auto ended =
      std::stable_partition(first, scopes.end(), [&](const Scope& scope) { return scope.stash != stash; });
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
