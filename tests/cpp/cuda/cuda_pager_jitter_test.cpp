// The pager on the emulated CUDA runtime, with random delays on every stream: late reads of compute, on any stream and
// from any thread, see the host's bytes.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "csrc/memory/limited_resource.h"
#include "csrc/paging/pager.h"
#include "csrc/transfer/cuda/cuda_pinner.h"
#include "emulator/cudart/control.h"
#include "tests/cpp/cuda/cuda_support.h"
#include "tests/cpp/support.h"

namespace hydra::test {
namespace {

constexpr Bytes kBlock = 2048;
constexpr int kBlocks = 6;

/// Its bytes are pinned, so copies read them late.
class Backing final : public BlockClient {
 public:
  explicit Backing(std::uint32_t seed) : bytes(random_bytes(kBlock, seed)) { EXPECT_TRUE(pinner.pin(place(), kBlock)); }
  ~Backing() override { pinner.unpin(place(), kBlock); }
  Job fill(void* slot) override { return copy_job(slot, bytes); }
  Job write_back(void* /*slot*/) override { return {}; }
  void publish(void* slot) noexcept override { where = slot; }
  void withdraw() noexcept override { where = nullptr; }

  void* place() const { return const_cast<std::uint8_t*>(bytes.data()); }

  CudaPinner pinner{0};
  const std::vector<std::uint8_t> bytes;
  std::atomic<void*> where{nullptr};
};

struct Rig {
  explicit Rig(cudaStream_t home, int slots)
      : device(make_cuda_device(0, home)),
        ledger(slots * kBlock),
        limited(device->slots(), ledger, MemoryClass::kWeights),
        pager(*device, limited, ledger) {
    for (int i = 0; i < kBlocks; ++i) {
      auto backing = std::make_unique<Backing>(static_cast<std::uint32_t>(i + 1));
      backings.push_back(backing.get());
      pager.add_block("block " + std::to_string(i), kBlock, std::move(backing));
    }
  }

  /// One operation: pins, enqueues a kernel that compares the slot when its turn comes, unpins.
  void use(int block, AcquireReason reason) {
    reason == AcquireReason::kHook ? pager.passes().arrive(block) : pager.acquire(block, reason);
    const Backing& backing = *backings[static_cast<std::size_t>(block)];
    const auto* slot = static_cast<const std::uint8_t*>(backing.where.load());
    emulated_cuda::launch(compute_stream, [this, slot, &backing] {
      ++kernels;
      wrong += std::equal(backing.bytes.begin(), backing.bytes.end(), slot) ? 0 : 1;
    });
    pager.release(block, reason);
  }

  std::unique_ptr<CudaDevice> device;
  Ledger ledger;
  LimitedResource limited;
  Pager pager;
  std::vector<Backing*> backings;
  std::atomic<int> kernels{0};
  std::atomic<int> wrong{0};
};

class CudaPagerJitter : public ::testing::TestWithParam<int> {};

TEST_P(CudaPagerJitter, ComputeReadsWhatTheHostHoldsWhateverStreamItRunsOn) {
  emulated_cuda::reset();
  cudaStream_t streams[2] = {};
  for (cudaStream_t& stream : streams) {
    HYDRA_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  emulated_cuda::set_delays(2e-4, static_cast<std::uint64_t>(GetParam()));
  {
    Rig rig(streams[0], 3);
    for (int pass = 0; pass < 4; ++pass) {
      rig.pager.passes().begin(PassKind::kForward);
      const auto work = [&rig, pass](cudaStream_t stream, std::uint32_t seed, bool hooks) {
        compute_stream = stream;
        std::mt19937 random(seed + static_cast<std::uint32_t>(pass));
        for (int i = 0; i < 40; ++i) {
          const int block = hooks ? i % kBlocks : static_cast<int>(random() % kBlocks);
          rig.use(block, hooks && i % 3 != 0 ? AcquireReason::kHook : AcquireReason::kFault);
        }
      };
      {
        const std::jthread other(work, streams[1], 100U, false);
        work(streams[0], 200U, true);
      }
      rig.pager.passes().end(true);
      EXPECT_EQ(rig.pager.pins(), 0);
    }
    rig.pager.close();
    for (cudaStream_t stream : streams) {
      HYDRA_CUDA(cudaStreamSynchronize(stream));
    }
    EXPECT_EQ(rig.kernels.load(), 4 * 80);
    EXPECT_EQ(rig.wrong.load(), 0);
    EXPECT_GT(rig.pager.statistics().evictions, 0);
    EXPECT_EQ(rig.ledger.in_use(), 0);
  }
  for (cudaStream_t stream : streams) {
    forget_cuda_error(cudaStreamDestroy(stream));
  }
  compute_stream = nullptr;
  emulated_cuda::reset();
}

INSTANTIATE_TEST_SUITE_P(Seeds, CudaPagerJitter, ::testing::Range(0, 8));

TEST(CudaPager, TheEndOfAPassWaitsForLoadsThatComputeWaitsForOnTheDeviceOnly) {
  emulated_cuda::reset();
  cudaStream_t home = nullptr;
  HYDRA_CUDA(cudaStreamCreateWithFlags(&home, cudaStreamNonBlocking));
  compute_stream = home;
  {
    Rig rig(home, 3);
    rig.pager.passes().begin(PassKind::kForward);
    Gate gate;
    emulated_cuda::launch(rig.device->to_device_stream(), [&gate] { gate.wait(); });
    rig.use(0, AcquireReason::kHook);
    std::atomic<bool> opened{false};
    const std::jthread opener([&] {
      opened = true;
      gate.open();
    });
    rig.pager.passes().end(true);
    EXPECT_TRUE(opened.load());
    EXPECT_EQ(rig.device->to_device().statistics().jobs, 1) << "the host's bytes may be written from here on";
    rig.pager.close();
    HYDRA_CUDA(cudaStreamSynchronize(home));
    EXPECT_EQ(rig.wrong.load(), 0);
  }
  forget_cuda_error(cudaStreamDestroy(home));
  compute_stream = nullptr;
}

}  // namespace
}  // namespace hydra::test
