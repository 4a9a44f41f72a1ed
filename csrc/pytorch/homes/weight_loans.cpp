#include "csrc/pytorch/homes/weight_loans.h"

#include <algorithm>
#include <utility>

#include "csrc/base/clock.h"

namespace hydra {

std::shared_ptr<WeightLoans::Loan> WeightLoans::expect(std::int32_t block, Bytes bytes,
                                                       std::shared_ptr<DeferredUpdate> update) {
  auto loan = std::make_shared<Loan>(shared_from_this(), block, bytes, std::move(update));
  const std::lock_guard lock(mutex_);
  waiting_.push_back(loan.get());
  read_ahead_locked();
  return loan;
}

void WeightLoans::read_ahead_locked() noexcept {
  while (!waiting_.empty() && expected_ < kAhead) {
    Loan& next = *waiting_.front();
    try {
      if (next.update_ && !next.update_->finished(next.block_)) {
        return;  // the weights on the disk are still the old ones
      }
      ArenaRegionPtr memory = memory_->take(next.bytes_, /*wait=*/false);
      if (!memory) {
        return;
      }
      next.ticket_ = disk_.read_weights(next.block_, memory);
      next.memory_ = std::move(memory);
    } catch (const std::exception&) {  // begin() meets the error again
      return;
    }
    next.expected_ = true;
    ++expected_;
    waiting_.pop_front();
  }
}

const std::byte* WeightLoans::Loan::begin() {
  const Clock::time_point start = Clock::now();
  if (update_) {
    update_->wait(block_);
  }
  WeightLoans& loans = *loans_;
  bool ahead = false;
  {
    const std::lock_guard lock(loans.mutex_);
    ahead = std::exchange(expected_, false);
    loans.expected_ -= ahead ? 1 : 0;
    std::erase(loans.waiting_, this);
    loans.read_ahead_locked();
  }
  if (!ahead) {
    // Takes memory last, when only the lane is left to wait for. A more urgent fill may still overtake this one, and
    // wait for an update that needs memory. The update finds some, since at most one fill can have been overtaken.
    updated_ = loans.disk_.updated_weights(block_);
    if (!updated_) {
      memory();
      ticket_ = loans.disk_.read_weights(block_, memory_);
    }
  }
  if (ticket_) {
    ticket_->wait();
  }
  const std::lock_guard lock(loans.mutex_);
  loans.wait_seconds_ += seconds_since(start);
  return updated_ ? updated_.get() : ticket_ ? memory_->data() : nullptr;
}

std::byte* WeightLoans::Loan::memory() {
  if (!memory_) {
    memory_ = loans_->memory_->take(bytes_);
  }
  return memory_->data();
}

WeightLoans::Loan::~Loan() {
  if (!loans_->home_.here()) {
    return;
  }
  memory_.reset();  // returned before read_ahead_locked() looks for memory, unless a read still uses it
  const std::lock_guard lock(loans_->mutex_);
  std::erase(loans_->waiting_, this);
  loans_->expected_ -= expected_ ? 1 : 0;
  loans_->read_ahead_locked();
}

double WeightLoans::wait_seconds() const {
  const std::lock_guard lock(mutex_);
  return wait_seconds_;
}

}  // namespace hydra
