// One run's account with a simulated device: its ledger, and the remedies when the ledger refuses a charge.
//
// The run and every allocation charged to it share the account, so that tensors may outlive the run. After
// close() no thread is charged, and live allocations are still discharged at their end. Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/memory/ledger.h"

namespace hydra {

class Account {
 public:
  explicit Account(Bytes limit) : ledger_(limit) {}
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;

  Ledger& ledger() noexcept { return ledger_; }

  /// `relieve` frees memory and returns whether it freed any. `explain` returns the rest of the message: where the run
  /// is, what uses the memory, and what to change.
  void open(std::function<bool()> relieve, std::function<std::string()> explain);
  void close() noexcept;
  bool closed() const noexcept { return closed_.load(std::memory_order_relaxed); }

  /// Charges `bytes`, and calls `relieve` as often as needed. Throws c10::OutOfMemoryError with the explanation.
  void charge(MemoryClass cls, Bytes bytes);

 private:
  Ledger ledger_;
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::function<bool()> relieve_;
  std::function<std::string()> explain_;
};

using AccountPtr = std::shared_ptr<Account>;

}  // namespace hydra
