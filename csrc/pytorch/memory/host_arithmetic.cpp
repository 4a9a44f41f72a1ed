#include "csrc/pytorch/memory/host_arithmetic.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "csrc/base/host_work.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/memory/landing_ring.h"

namespace hydra {

namespace {

/// The numbers of one task: the most for which torch starts no threads of its own, as it would for each thread that
/// calls it. A multiple of torch's vectors of every dtype: the loop's scalar end, where a NaN may get other bits, is
/// then where it is in one call. So few that a converted copy stays in a core's cache.
constexpr std::int64_t kTaskNumbers = at::internal::GRAIN_SIZE;
/// A landed piece of fp32 numbers has this many tasks.
constexpr Bytes kMostThreads = LandingRing::kPieceBytes / (kTaskNumbers * static_cast<Bytes>(sizeof(float)));

int threads_for_sharing() { return std::clamp(at::get_num_threads(), 1, static_cast<int>(kMostThreads)); }

Bytes bytes_of_one(const HostNumbers& numbers) { return static_cast<Bytes>(c10::elementSize(numbers.dtype)); }

HostNumbers behind(const HostNumbers& numbers, std::int64_t count) {
  return {numbers.begin + count * bytes_of_one(numbers), numbers.dtype};
}

at::Tensor view_of(const HostNumbers& numbers, std::int64_t count) {
  return at::from_blob(numbers.begin, {count}, at::TensorOptions().device(at::kCPU).dtype(numbers.dtype));
}

void convert_some(const HostNumbers& to, const HostNumbers& from, std::int64_t count) {
  view_of(to, count).copy_(view_of(from, count));
}

void add_some(const HostNumbers& to, const HostNumbers& from, std::int64_t count) {
  view_of(to, count).add_(view_of(from, count).to(to.dtype));
}

}  // namespace

HostArithmetic::HostArithmetic() : threads_(threads_for_sharing()) {}

void HostArithmetic::convert(const HostNumbers& to, const HostNumbers& from, std::int64_t count) {
  if (!host_work_taken(count * (bytes_of_one(to) + bytes_of_one(from)))) {
    share(&convert_some, to, from, count);
  }
}

void HostArithmetic::add(const HostNumbers& to, const HostNumbers& from, std::int64_t count) {
  if (!host_work_taken(count * (2 * bytes_of_one(to) + bytes_of_one(from)))) {
    share(&add_some, to, from, count);
  }
}

void HostArithmetic::share(Loop loop, const HostNumbers& to, const HostNumbers& from, std::int64_t count) {
  threads_.parallel_for((count + kTaskNumbers - 1) / kTaskNumbers, [&](std::int64_t task) {
    const at::NoGradGuard no_grad;
    const HostScope on_the_host;
    const std::int64_t begin = task * kTaskNumbers;
    loop(behind(to, begin), behind(from, begin), std::min(kTaskNumbers, count - begin));
  });
}

}  // namespace hydra
