// The contract suite on CUDA: with the real runtime on a GPU, with the emulated one anywhere.
#include "tests/cpp/cuda/cuda_support.h"
#include "tests/cpp/transfer/device_contract.h"

namespace hydra::test {
namespace {

std::string case_name(const ::testing::TestParamInfo<BackendCase>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Cuda, DeviceContract,
                         ::testing::Values(BackendCase{.name = "cuda", .make = [] { return make_cuda_device(); }}),
                         case_name);

}  // namespace
}  // namespace hydra::test
