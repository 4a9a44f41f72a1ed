#include "csrc/plan/units/ready_jobs.h"

#include <algorithm>
#include <utility>

namespace hydra {

namespace {

bool comes_later(const ReadyJob& a, const ReadyJob& b) { return b < a; }

}  // namespace

void ReadyJobs::insert(ReadyJob entry) {
  jobs_.push_back(entry);
  if (!is_random_) {
    std::push_heap(jobs_.begin(), jobs_.end(), comes_later);
  }
}

ReadyJob ReadyJobs::take() {
  if (is_random_) {
    std::swap(jobs_[draw(jobs_.size())], jobs_.back());
  } else {
    std::pop_heap(jobs_.begin(), jobs_.end(), comes_later);
  }
  const ReadyJob taken = jobs_.back();
  jobs_.pop_back();
  return taken;
}

bool ReadyJobs::is_first(const ReadyJob& other) {
  if (jobs_.empty()) {
    return true;
  }
  return is_random_ ? draw(jobs_.size() + 1) == 0 : other < jobs_.front();
}

/// A number below `count`. Standard libraries have different distributions, and equal remainders.
std::size_t ReadyJobs::draw(std::size_t count) { return static_cast<std::size_t>(random_() % count); }

}  // namespace hydra
