#include "csrc/paging/pager.h"

#include <chrono>
#include <limits>
#include <optional>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

class Stopwatch {
 public:
  explicit Stopwatch(double& total) noexcept : total_(total) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

constexpr Bytes kAnyRoom = std::numeric_limits<Bytes>::max();

}  // namespace

Pager::Pager(DeviceBackend& backend, Resource& slots, Ledger& ledger)
    : backend_(backend), slots_(slots), ledger_(ledger) {}

Pager::~Pager() { close(); }

std::int32_t Pager::add_block(std::string name, Bytes bytes, std::unique_ptr<BlockClient> client) {
  HYDRA_EXPECT(bytes > 0, StateError, "block '" + name + "' has no bytes to page");
  auto block = std::make_unique<Block>();
  block->name = std::move(name);
  block->bytes = bytes;
  block->client = std::move(client);
  block->next_use = kNever;
  const std::lock_guard lock(mutex_);
  const auto index = static_cast<std::int32_t>(blocks_.size());
  block->index = index;
  blocks_.push_back(std::move(block));
  slot_bytes_.push_back(bytes);
  return index;
}

Pager::Block& Pager::at(std::int32_t block) const {
  HYDRA_EXPECT(block >= 0 && static_cast<std::size_t>(block) < blocks_.size(), StateError,
               "block " + std::to_string(block) + " was asked for; there are " + std::to_string(blocks_.size()));
  return *blocks_[static_cast<std::size_t>(block)];
}

Bytes Pager::activation_peak() {
  if (activation_meter_) {
    return activation_meter_();
  }
  const Bytes peak = ledger_.take_activation_peak();
  const std::lock_guard lock(mutex_);
  return peak + std::exchange(gradients_leaving_, 0);
}

void Pager::note_leaving(Bytes gradients) {
  const std::lock_guard lock(mutex_);
  gradients_leaving_ += gradients;
}

// ---- passes -----------------------------------------------------------------------------------

void Pager::begin_pass(PassKind kind, int version) {
  home_.expect_here();
  activation_peak();  // discards the peak between the passes
  std::vector<std::int32_t> wanted;
  Bytes room = 0;
  {
    const std::lock_guard lock(mutex_);
    trace_.begin(kind, version);
    wanted = plan_locked(room);
  }
  fetch_ahead(wanted, room);
}

void Pager::end_pass(bool completed) noexcept {
  if (!home_.here()) {
    return;
  }
  try {
    const Bytes peak = activation_peak();
    const std::lock_guard lock(mutex_);
    trace_.end(peak, completed);
  } catch (const std::exception&) {
    // The meter failed, or there was no host memory for the record: later passes do not plan by this one.
    const std::lock_guard lock(mutex_);
    trace_.end(0, /*completed=*/false);
  }
  double waited = 0.0;
  {
    const Stopwatch watch(waited);
    std::optional<ActivityRange> range;
    for (const auto& block : blocks_) {
      TicketPtr ticket;
      {
        const std::lock_guard lock(mutex_);
        ticket = block->ticket;  // present blocks have one too, if compute waits on the device and not the host
      }
      if (ticket && !ticket->finished() && !range) {
        range.emplace(backend_.activity(), ActivityRow::kCompute, ActivityKind::kWaitForTransfers);
      }
      if (ticket) {
        ticket->wait_quietly();  // its error surfaces where the block is needed
      }
    }
  }
  const std::lock_guard lock(mutex_);
  statistics_.drain_wait_seconds += waited;
}

std::vector<std::int32_t> Pager::plan_locked(Bytes& room) {
  for (const auto& block : blocks_) {
    block->next_use = kNever;
    block->wanted = false;
  }
  // Settled blocks keep their slots under any plan: their bytes are subtracted from every moment's room, and they count
  // as empty in the choice.
  std::vector<Bytes> sizes = slot_bytes_;
  Bytes settled = 0;
  Bytes beside = 0;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i]->settled) {
      settled += std::exchange(sizes[i], 0);
      beside += blocks_[i]->beside;
    }
  }
  std::vector<Use> future = trace_.future(ledger_.limit() - beside, gradient_reserve_, blocks_.size());
  if (future.empty()) {
    return {};
  }
  for (std::size_t when = future.size(); when-- > 0;) {
    at(future[when].block).next_use = static_cast<std::int64_t>(when);
  }
  std::vector<bool> resident(blocks_.size());
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const BlockState state = blocks_[i]->state;
    resident[i] = state == BlockState::kPresent || state == BlockState::kLoading;
  }
  room = future[0].room;
  for (Use& use : future) {
    use.room -= settled;
  }
  std::vector<std::int32_t> wanted = choose_resident(future, sizes, resident);
  for (const std::int32_t index : wanted) {
    at(index).wanted = true;
  }
  return wanted;
}

void Pager::arrive(std::int32_t index) {
  home_.expect_here();
  Block& block = at(index);
  backend_.expect_usable();
  const Bytes peak = activation_peak();
  std::vector<std::int32_t> wanted;
  Bytes room = 0;
  {
    const std::lock_guard lock(mutex_);
    trace_.arrive(index, peak);
    block.last_arrival = ++arrivals_;
    wanted = plan_locked(room);
    ++block.pins;
  }
  try {
    ensure_filling(block, Priority::kFault, false, kAnyRoom);
    fetch_ahead(wanted, room);
    wait_present(block, AcquireReason::kHook);
    follow_writes(block);
  } catch (...) {  // re-raised: a failed arrival pins nothing
    const std::lock_guard lock(mutex_);
    unpin_locked(block);
    throw;
  }
}

void Pager::fetch_ahead(const std::vector<std::int32_t>& wanted, Bytes room) {
  if (wanted.empty()) {
    return;
  }
  trim(room);
  for (const std::int32_t index : wanted) {
    try {
      ensure_filling(at(index), Priority::kPrefetch, true, room);
    } catch (const OutOfMemory&) {
      return;  // no room yet: the block is fetched when it is needed
    }
  }
}

// ---- pins -------------------------------------------------------------------------------------

void Pager::acquire(std::int32_t index, AcquireReason reason) {
  home_.expect_here();
  Block& block = at(index);
  backend_.expect_usable();
  {
    const std::lock_guard lock(mutex_);
    ++block.pins;
    if (block.state == BlockState::kPresent && !block.ticket && !block.written) {
      block.used_since_fence = true;
      return;
    }
  }
  try {
    wait_present(block, reason);
    follow_writes(block);
  } catch (...) {  // re-raised: a failed acquire pins nothing
    const std::lock_guard lock(mutex_);
    unpin_locked(block);
    throw;
  }
}

void Pager::wait_present(Block& block, AcquireReason reason) {
  bool counted = false;
  double waited = 0.0;
  std::optional<ActivityRange> range;
  std::unique_lock lock(mutex_);
  while (block.state != BlockState::kPresent || block.ticket) {
    if (block.state != BlockState::kPresent && reason == AcquireReason::kFault && !counted) {
      HYDRA_EXPECT(fault_path_, PageFaultError,
                   "block '" + block.name +
                       "' was read while absent and the fault path is off; "
                       "turn it on, or enter the block through its module");
      ++statistics_.faults;
      counted = true;
    }
    if (block.state == BlockState::kReserving) {
      changed_->wait(lock, [&] { return block.state != BlockState::kReserving; });
      continue;
    }
    if (!range && !(block.ticket && block.ticket->finished())) {
      range.emplace(backend_.activity(), ActivityRow::kCompute,
                    reason == AcquireReason::kHook ? ActivityKind::kWaitForWeights : ActivityKind::kWaitForFault,
                    ActivityLabel{.block = block.index});
    }
    const Stopwatch watch(waited);
    if (block.state == BlockState::kAbsent || block.state == BlockState::kStale) {
      lock.unlock();
      ensure_filling(block, Priority::kFault, false, kAnyRoom);
      lock.lock();
      continue;
    }
    const TicketPtr ticket = block.ticket;
    lock.unlock();
    try {
      backend_.compute_waits(*ticket);
    } catch (...) {  // re-raised
      drop_failed_fill(block, ticket);
      throw;
    }
    const bool finished = ticket->finished();
    lock.lock();
    if (block.ticket == ticket) {
      if (block.state == BlockState::kLoading) {
        block.state = BlockState::kPresent;
        block.client->publish(block.slot);
        changed_->notify_all();
      }
      if (finished) {
        block.ticket = nullptr;
      } else {
        break;  // this thread's compute waits on the device; the ticket stays for the compute of other threads
      }
    }
  }
  block.used_since_fence = true;
  (reason == AcquireReason::kHook ? statistics_.hook_wait_seconds : statistics_.fault_wait_seconds) += waited;
}

void Pager::follow_writes(Block& block) {
  FencePtr written;
  {
    const std::lock_guard lock(mutex_);
    written = block.written;
  }
  if (!written) {
    return;
  }
  backend_.compute_follows(written);
  if (written->reached()) {
    const std::lock_guard lock(mutex_);
    if (block.written == written) {
      block.written = nullptr;
    }
  }
}

void Pager::release(std::int32_t index, AcquireReason reason) noexcept {
  if (!home_.here()) {
    return;
  }
  Block& block = *blocks_[static_cast<std::size_t>(index)];
  // Recorded under the lock: otherwise another thread's use in between would seem to be covered by this fence.
  const std::lock_guard lock(mutex_);
  try {
    if (block.slot != nullptr) {
      backend_.note_read(block.slot, block.bytes);
    }
    // Leaving a block records a fence. Single operations are covered by the next one, or by one recorded at eviction.
    FencePtr fence = reason == AcquireReason::kHook ? backend_.record() : backend_.record_use();
    if (fence) {
      forget_reached_locked(block);
      block.last_uses.push_back(std::move(fence));
    }
    block.used_since_fence = reason != AcquireReason::kHook;
  } catch (const std::exception&) {
    block.used_since_fence = true;  // the one that is made at eviction has to cover this use
  }
  unpin_locked(block);
}

// ---- figures ----------------------------------------------------------------------------------

BlockState Pager::state(std::int32_t block) const {
  const std::lock_guard lock(mutex_);
  return at(block).state;
}

std::int64_t Pager::pins() const {
  const std::lock_guard lock(mutex_);
  std::int64_t sum = 0;
  for (const auto& block : blocks_) {
    sum += block->pins;
  }
  return sum;
}

Bytes Pager::resident_bytes() const {
  const std::lock_guard lock(mutex_);
  Bytes sum = 0;
  for (const auto& block : blocks_) {
    sum += block->slot != nullptr ? block->bytes : 0;
  }
  return sum;
}

PagerStatistics Pager::statistics() const {
  const std::lock_guard lock(mutex_);
  PagerStatistics statistics = statistics_;
  statistics.order_changes = trace_.order_changes();
  return statistics;
}

std::vector<std::pair<std::int32_t, Bytes>> Pager::recorded(PassKind kind) const {
  const std::lock_guard lock(mutex_);
  return trace_.recorded(kind);
}

std::string Pager::describe_residents() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& block : blocks_) {
    if (block->slot != nullptr) {
      text += (text.empty() ? "" : ", ") + ("'" + block->name + "' " + human_bytes(block->bytes)) +
              (block->settled    ? " at home"
               : block->pins > 0 ? " in use"
                                 : "");
    }
  }
  return text.empty() ? "no block" : text;
}

}  // namespace hydra
