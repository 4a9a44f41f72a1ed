#include "csrc/pytorch/memory/account.h"

#include <c10/util/Exception.h>

#include "csrc/base/errors.h"
#include "csrc/memory/out_of_memory.h"

namespace hydra {

void Account::open(std::function<bool()> relieve, std::function<std::string()> explain) {
  const std::lock_guard lock(mutex_);
  relieve_ = std::move(relieve);
  explain_ = std::move(explain);
}

void Account::close() noexcept {
  closed_ = true;
  const std::lock_guard lock(mutex_);
  relieve_ = nullptr;
  explain_ = nullptr;
}

void Account::charge(MemoryClass cls, Bytes bytes) {
  while (!ledger_.try_charge(cls, bytes)) {
    std::function<bool()> relieve;
    std::function<std::string()> explain;
    {
      const std::lock_guard lock(mutex_);
      relieve = relieve_;
      explain = explain_;
    }
    if (relieve && relieve()) {
      continue;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, kOutOfMemory, human_bytes(bytes), " asked, ",
                     human_bytes(ledger_.in_use()), " of the budget of ", human_bytes(ledger_.limit()),
                     " in use: this moment needs ", human_bytes(ledger_.in_use() + bytes), ". ", kNothingMore,
                     explain ? explain() : std::string());
  }
}

}  // namespace hydra
