#include "csrc/pytorch/gradients/leaving_norm.h"

#include <utility>

#include "csrc/pytorch/memory/number_format.h"
#include "csrc/pytorch/parameters/withheld.h"

namespace hydra {

namespace {

/// A gradient as it arrived. Keeps its memory alive, so that no other gradient can get the same address.
struct Arrived {
  c10::Storage storage;
  const void* data = nullptr;
  std::int64_t version = 0;

  static Arrived of(const at::Tensor& gradient) {
    return {gradient.storage(), gradient.unsafeGetTensorImpl()->data(), gradient._version()};
  }
  bool is(const at::Tensor& gradient) const {
    return gradient.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl() &&
           gradient._version() == version && (withheld_of(gradient) || gradient.unsafeGetTensorImpl()->data() == data);
  }
};

bool lies_as(const at::Tensor& gradient, const at::Tensor& host) {
  return gradient.layout() == at::kStrided && gradient.has_storage() && gradient.sizes() == host.sizes() &&
         gradient.strides() == host.strides();
}

}  // namespace

std::shared_ptr<NormAccumulator> LeavingNorm::accumulator() const {
  const std::lock_guard lock(mutex_);
  return accumulator_;
}

void LeavingNorm::begin(std::shared_ptr<ThreadPool> pool) {
  end();
  auto fresh = std::make_shared<NormAccumulator>(
      [pool = std::move(pool)](std::span<const NormInput> gradients, std::span<double> sums) {
        sums_of_squares(gradients, sums, *pool);
      });
  const std::lock_guard lock(mutex_);
  accumulator_ = std::move(fresh);
}

void LeavingNorm::forget() {
  if (const auto known = accumulator()) {
    known->forget();
  }
}

void LeavingNorm::finish() {
  if (const auto known = accumulator()) {
    known->release();
    known->finish();
  }
}

bool LeavingNorm::holds(const HostParameter& parameter) const {
  const auto known = accumulator();
  return known && known->holds(parameter.host.unsafeGetTensorImpl());
}

void LeavingNorm::end() {
  std::shared_ptr<NormAccumulator> known;
  {
    const std::lock_guard lock(mutex_);
    known = std::exchange(accumulator_, nullptr);
  }
  if (known) {
    known->forget();
  }
}

LeavingNorm::Arrival LeavingNorm::expect(const HostParameter& parameter) {
  auto known = accumulator();
  if (!known) {
    return {};
  }
  const NormAccumulator::Key key = parameter.host.unsafeGetTensorImpl();
  const std::int64_t number = known->expect(key);
  return [known = std::move(known), key, number, host = parameter.host](const at::Tensor& gradient) {
    const std::optional<NumberFormat> format = number_format(gradient.scalar_type());
    if (format && lies_as(gradient, host)) {
      auto arrived = std::make_shared<const Arrived>(Arrived::of(gradient));
      const NormInput input{.data = arrived->data, .format = *format, .count = gradient.numel()};
      known->arrived(key, number, input, std::move(arrived));
    }
  };
}

void LeavingNorm::release() {
  if (const auto known = accumulator()) {
    known->release();
  }
}

std::vector<std::optional<double>> LeavingNorm::take(const std::vector<at::Tensor>& hosts) {
  std::vector<std::optional<double>> sums(hosts.size());
  std::shared_ptr<NormAccumulator> known;
  {
    const std::lock_guard lock(mutex_);
    known = std::exchange(accumulator_, nullptr);
  }
  if (!known) {
    return sums;
  }
  const auto found = known->take();
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    const auto sum = found.find(hosts[i].unsafeGetTensorImpl());
    const at::Tensor& gradient = hosts[i].unsafeGetTensorImpl()->grad();
    if (sum != found.end() && gradient.defined() && lies_as(gradient, hosts[i]) &&
        static_cast<const Arrived*>(sum->second.owner.get())->is(gradient)) {
      sums[i] = sum->second.value;
    }
  }
  const std::lock_guard lock(mutex_);
  for (const std::optional<double>& sum : sums) {
    taken_ += sum ? 1 : 0;
  }
  return sums;
}

std::int64_t LeavingNorm::taken() const {
  const std::lock_guard lock(mutex_);
  return taken_;
}

}  // namespace hydra
