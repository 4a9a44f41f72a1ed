#include "csrc/pytorch/model/model_memory.h"

#include <utility>

namespace hydra {

ModelMemory::ModelMemory(std::shared_ptr<DeviceBackend> backend, std::shared_ptr<HostArena> arena, Bytes budget,
                         bool simulated)
    : backend_(std::move(backend)),
      arena_(std::move(arena)),
      budget_(budget),
      simulated_(simulated),
      account_(std::make_shared<Account>(budget)),
      tracked_(backend_->slots()),
      slots_(tracked_, account_->ledger(), MemoryClass::kWeights),
      optimizer_state_(tracked_, account_->ledger(), MemoryClass::kOptimizer) {}

void ModelMemory::open(const std::function<bool()>& relieve, const std::function<std::string()>& explain) {
  account_->open(relieve, explain);
  service_ = backend_->serve({budget_, relieve, explain});
}

void ModelMemory::close() noexcept {
  account_->ledger().discharge(MemoryClass::kBuffers, std::exchange(buffer_bytes_, 0));
  account_->close();
}

void ModelMemory::charge_buffers(Bytes bytes) {
  account_->charge(MemoryClass::kBuffers, bytes);
  buffer_bytes_ += bytes;
}

std::string ModelMemory::describe() const {
  if (const DeviceMeter seen = meter(); seen.describe) {
    return seen.describe();
  }
  const Ledger& ledger = account_->ledger();
  return "weights " + human_bytes(ledger.in_use(MemoryClass::kWeights)) + ", gradients " +
         human_bytes(ledger.in_use(MemoryClass::kGradients)) + ", activations and workspace " +
         human_bytes(ledger.in_use(MemoryClass::kActivations)) + ", buffers " +
         human_bytes(ledger.in_use(MemoryClass::kBuffers)) + ", optimizer state " +
         human_bytes(ledger.in_use(MemoryClass::kOptimizer));
}

}  // namespace hydra
