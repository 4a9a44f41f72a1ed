#include "csrc/pytorch/memory/counting_allocator.h"

#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/util/flat_hash_map.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <mutex>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

struct Charge {
  AccountPtr account;
  Bytes bytes = 0;
  MemoryClass cls = MemoryClass::kActivations;
};

class ChargeTable {
 public:
  void put(void* pointer, Charge charge) {
    Shard& shard = shard_of(pointer);
    const std::lock_guard lock(shard.mutex);
    shard.charges[pointer] = std::move(charge);
  }

  /// Removes and returns the charge of an allocation, or a charge without an account.
  Charge take(void* pointer) {
    Shard& shard = shard_of(pointer);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.charges.find(pointer);
    if (found == shard.charges.end()) {
      return {};
    }
    Charge charge = std::move(found->second);
    shard.charges.erase(found);
    return charge;
  }

  Bytes bytes(const void* pointer) {
    Shard& shard = shard_of(pointer);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.charges.find(const_cast<void*>(pointer));
    return found == shard.charges.end() ? 0 : found->second.bytes;
  }

  bool move(const void* pointer, MemoryClass cls) {
    Shard& shard = shard_of(pointer);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.charges.find(const_cast<void*>(pointer));
    if (found == shard.charges.end()) {
      return false;
    }
    Charge& charge = found->second;
    charge.account->ledger().move(charge.cls, cls, charge.bytes);
    charge.cls = cls;
    return true;
  }

  void lock() {
    for (Shard& shard : shards_) {
      shard.mutex.lock();
    }
  }
  void unlock() {
    for (Shard& shard : shards_) {
      shard.mutex.unlock();
    }
  }

 private:
  struct alignas(64) Shard {
    std::mutex mutex;
    ska::flat_hash_map<void*, Charge> charges;
  };

  Shard& shard_of(const void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer) >> 6;
    return shards_[(address * 11400714819323198485ULL) >> 58];
  }

  std::array<Shard, 64> shards_;
};

/// Never destroyed, on purpose: tensors are freed after main() has returned.
ChargeTable& table() {
  static auto* const instance = std::make_unique<ChargeTable>().release();
  return *instance;
}

std::atomic<int> charged_threads{0};

struct ThreadState {
  ThreadCharge charge;
  int host_depth = 0;
  ~ThreadState() { charged_threads -= charge.account ? 1 : 0; }
};
thread_local ThreadState thread_state;

/// The account that was given to any thread last, for workers of parallel regions.
std::mutex latest_mutex;
std::weak_ptr<Account>& latest_account() {
  static auto* const instance = std::make_unique<std::weak_ptr<Account>>().release();
  return *instance;
}

c10::DeleterFnPtr previous_deleter = nullptr;

/// The deleter of every charged pointer, and the allocator's raw deleter.
void delete_charged(void* pointer) {
  const Charge charge = table().take(pointer);
  previous_deleter(pointer);
  if (charge.account) {
    charge.account->ledger().discharge(charge.cls, charge.bytes);
  }
}

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* previous) : previous_(previous) {}

  c10::DataPtr allocate(std::size_t size) override {
    AccountPtr account = size == 0 ? nullptr : current_account();
    if (!account) {
      return previous_->allocate(size);
    }
    const auto bytes = static_cast<Bytes>(size);
    account->charge(MemoryClass::kActivations, bytes);
    c10::DataPtr data;
    try {
      data = previous_->allocate(size);
    } catch (...) {
      account->ledger().discharge(MemoryClass::kActivations, bytes);
      throw;
    }
    void* const pointer = data.get();
    table().put(pointer, {std::move(account), bytes, MemoryClass::kActivations});
    TORCH_CHECK(data.compare_exchange_deleter(previous_deleter, &delete_charged),
                "hydra_ext: the CPU allocator returned a pointer that it does not free itself");
    return data;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &delete_charged; }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }

 private:
  c10::Allocator* previous_;
};

std::atomic<CountingAllocator*> installed{nullptr};

}  // namespace

ThreadCharge exchange_thread_charge(ThreadCharge charge) {
  if (charge.account) {
    install_counting_allocator();
    const std::lock_guard lock(latest_mutex);
    latest_account() = charge.account;
  }
  charged_threads += (charge.account ? 1 : 0) - (thread_state.charge.account ? 1 : 0);
  return std::exchange(thread_state.charge, std::move(charge));
}

AccountPtr current_account() {
  if (thread_state.host_depth > 0) {
    return nullptr;
  }
  const ThreadCharge& charge = thread_state.charge;
  if (charge.account) {
    if (!charge.account->closed() && !(charge.while_graph_lives && charge.graph.expired())) {
      return charge.account;
    }
    exchange_thread_charge({});
  }
  if (charged_threads.load(std::memory_order_relaxed) > 0 && at::in_parallel_region()) {
    const std::lock_guard lock(latest_mutex);
    AccountPtr latest = latest_account().lock();
    return latest && !latest->closed() ? latest : nullptr;
  }
  return nullptr;
}

HostScope::HostScope() noexcept { ++thread_state.host_depth; }
HostScope::~HostScope() { --thread_state.host_depth; }

namespace {

/// Holds all locks over a fork, which copies the calling thread only: other threads' locks would stay locked in the
/// child.
void hold_locks() {
  latest_mutex.lock();
  table().lock();
}
void release_locks() {
  table().unlock();
  latest_mutex.unlock();
}
void begin_as_child() {
  release_locks();
  exchange_thread_charge({});
  charged_threads = 0;
}

}  // namespace

void install_counting_allocator() {
  static std::mutex mutex;
  if (installed.load() != nullptr) {
    return;
  }
  const std::lock_guard lock(mutex);
  if (installed.load() != nullptr) {
    return;
  }
  c10::Allocator* previous = c10::GetAllocator(c10::kCPU);
  previous_deleter = previous->raw_deleter();
  HYDRA_EXPECT(previous_deleter != nullptr, StateError,
               "the CPU allocator in place has no raw deleter, so the simulated device cannot count its allocations; "
               "import hydra_ext before the library that replaced the allocator");
  // Leaked on purpose: storages keep a pointer to their allocator as long as they live.
  installed = std::make_unique<CountingAllocator>(previous).release();
  ::pthread_atfork(&hold_locks, &release_locks, &begin_as_child);
  c10::SetAllocator(c10::kCPU, installed.load(), 0);
}

bool reclassify(const void* pointer, MemoryClass cls) { return table().move(pointer, cls); }
bool is_charged(const void* pointer) { return table().bytes(pointer) > 0; }

}  // namespace hydra
