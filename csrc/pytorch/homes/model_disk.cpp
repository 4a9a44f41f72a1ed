#include "csrc/pytorch/homes/model_disk.h"

#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

ModelDisk::ModelDisk(DeviceBackend& backend, std::shared_ptr<HostArena> arena, ModelBlocks& blocks,
                     const WindowGate& gate)
    : backend_(backend), arena_(std::move(arena)), blocks_(blocks), gate_(gate) {}

void ModelDisk::open(const std::string& folder, const std::vector<Bytes>& sizes,
                     std::shared_ptr<FileOperations> files) {
  HYDRA_EXPECT(!homes_ && !gate_.closed(), StateError, "an offload context takes one spill_dir, before it ends");
  auto homes = std::make_unique<DiskHomes>(folder, arena_, std::move(files));
  homes->reserve(sizes);
  homes_ = std::move(homes);
  loans_ = std::make_shared<WeightLoans>(*homes_, arena_, fills());
  gradient_buffers_ = std::make_shared<HostBuffers>(arena_);
}

void ModelDisk::close() noexcept {
  if (!process_.here()) {
    // Threads that do not exist in this child may have been using the homes at the fork, so their destructor could
    // hang.
    static_cast<void>(homes_.release());
    return;
  }
  used_ = statistics();
  for (BlockBacking* backing : blocks_.backings()) {
    backing->goes_to_disk(nullptr);
    for (HostParameter* parameter : backing->parameters()) {
      parameter->gradient_buffers.reset();
    }
  }
  gradient_buffers_.reset();
  loans_.reset();
  homes_.reset();
}

DiskHomes& ModelDisk::expect_open(const char* message) const {
  HYDRA_EXPECT(homes_ && !gate_.closed(), StateError, message);
  return *homes_;
}

void ModelDisk::expect_here() const {
  if (homes_) {
    process_.expect_here();
  }
}

at::Tensor ModelDisk::make(std::int32_t block, const at::Tensor& like, at::ScalarType dtype, bool copies) {
  return expect_open("optimizer state cannot be made on the disk outside the model's context")
      .make(block, like, dtype, copies, blocks_.owner());
}

DiskStatistics ModelDisk::statistics() const {
  if (!homes_ || !process_.here()) {
    return used_;
  }
  DiskStatistics statistics = homes_->statistics();
  statistics.wait_seconds += loans_->wait_seconds();
  statistics.working_bytes += loans_->bytes() + gradient_buffers_->lent_bytes() + gradient_buffers_->kept_bytes();
  return statistics;
}

}  // namespace hydra
