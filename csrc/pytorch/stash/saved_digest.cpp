#include "csrc/pytorch/stash/saved_digest.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "csrc/base/place_sum.h"
#include "csrc/pytorch/model/paged_model.h"

namespace hydra {
namespace {

constexpr Bytes kChunk = Bytes{1} << 20;                // one thread's share of a large tensor
constexpr std::int64_t kItems = std::int64_t{1} << 20;  // the most that are reduced at a time on a device
constexpr auto kFactor1 = static_cast<std::int64_t>(kPlaceFactor1);
constexpr auto kFactor2 = static_cast<std::int64_t>(kPlaceFactor2);
constexpr auto kFactor3 = static_cast<std::int64_t>(kPlaceFactor3);

AddByPlace add_by_kernel = nullptr;  // set when the extension is loaded

struct Dimension {
  std::int64_t size;
  std::int64_t stride;
};

/// The dimensions from the outermost to the innermost in memory, merged as far as possible. Those that repeat the same
/// numbers are left out.
std::vector<Dimension> dimensions_of(const at::Tensor& tensor) {
  std::vector<Dimension> found;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) != 0) {
      found.push_back({tensor.size(i), tensor.stride(i)});
    }
  }
  std::stable_sort(found.begin(), found.end(), [](auto one, auto other) { return one.stride > other.stride; });
  std::vector<Dimension> merged;
  for (const Dimension each : found) {
    if (!merged.empty() && merged.back().stride == each.stride * each.size) {
      merged.back() = {merged.back().size * each.size, each.stride};
    } else {
      merged.push_back(each);
    }
  }
  return merged;
}

/// Adds contiguous bytes. Only their number decides where a large run is cut, not the number of threads.
void add_run(Digest& digest, const std::uint8_t* data, Bytes bytes) {
  if (bytes < 2 * kChunk) {
    digest.add(data, bytes);
    return;
  }
  std::vector<std::uint64_t> values(static_cast<std::size_t>((bytes + kChunk - 1) / kChunk));
  at::parallel_for(0, static_cast<std::int64_t>(values.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Digest chunk;
      chunk.add(data + i * kChunk, std::min(kChunk, bytes - i * kChunk));
      values[static_cast<std::size_t>(i)] = chunk.value();
    }
  });
  digest.add(values.data(), static_cast<Bytes>(values.size() * sizeof(std::uint64_t)));
}

void add_numbers(Digest& digest, const at::Tensor& tensor) {
  std::vector<Dimension> outer = dimensions_of(tensor);
  const auto item = static_cast<std::int64_t>(tensor.itemsize());
  std::int64_t run = item;
  if (!outer.empty() && outer.back().stride == 1) {
    run *= outer.back().size;
    outer.pop_back();
  }
  const auto* data = static_cast<const std::uint8_t*>(tensor.const_data_ptr());
  std::vector<std::int64_t> place(outer.size(), 0);
  for (bool more = true; more;) {
    add_run(digest, data, run);
    more = false;
    for (std::size_t i = outer.size(); i-- > 0 && !more;) {
      data += outer[i].stride * item;
      more = ++place[i] < outer[i].size;
      if (!more) {
        data -= outer[i].size * outer[i].stride * item;
        place[i] = 0;
      }
    }
  }
}

at::ScalarType integer_of(std::size_t bytes) {
  return bytes == 1 ? at::kChar : bytes == 2 ? at::kShort : bytes == 4 ? at::kInt : at::kLong;
}

/// Whether this may be private data of a library (the recurrent layers of oneDNN and cuDNN save such tensors): bytes,
/// some of which are never written.
bool is_opaque(const at::Tensor& tensor) { return tensor.scalar_type() == at::kByte && tensor.dim() == 1; }

bool is_comparable(const at::Tensor& tensor) {
  return !is_opaque(tensor) && tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() &&
         tensor.has_storage() && !tensor.key_set().has(at::DispatchKey::Python);
}

/// Adds a part of a tensor to `sum`; `first` is the place of its first number. A large part is halved until at most
/// kItems numbers are copied at a time, whatever the strides.
void add_by_place(const at::Tensor& part, std::int64_t first, at::Tensor& sum) {
  if (part.numel() > kItems) {
    const auto sizes = part.sizes();
    const auto longest = std::max_element(sizes.begin(), sizes.end());
    const std::int64_t dimension = longest - sizes.begin();
    const at::Tensor half = part.narrow(dimension, 0, *longest / 2);
    add_by_place(half, first, sum);
    add_by_place(part.narrow(dimension, *longest / 2, *longest - *longest / 2), first + half.numel(), sum);
    return;
  }
  at::Tensor items = part.resolve_conj().resolve_neg().contiguous().view({part.numel()});
  if (items.is_complex()) {
    items = at::view_as_real(items).view({2 * items.numel()});
    first *= 2;
  }
  items = items.view(integer_of(items.itemsize()));
  at::Tensor mixed = items.to(at::kLong, /*non_blocking=*/false, /*copy=*/true);
  mixed.mul_(kFactor1).add_(at::arange(first, first + items.numel(), mixed.options()).mul_(kFactor2));
  mixed.bitwise_xor_(mixed.bitwise_right_shift(kPlaceShift1)).mul_(kFactor3);
  mixed.bitwise_xor_(mixed.bitwise_right_shift(kPlaceShift2));
  sum.add_(mixed.sum());
}

}  // namespace

SavedDigest::SavedDigest(const std::vector<at::Tensor>& parameters) {
  auto known = std::make_shared<Parameters>();
  for (const at::Tensor& parameter : parameters) {
    if (parameter.has_storage() &&
        known->number.emplace(parameter.storage().unsafeGetStorageImpl(), known->held.size()).second) {
      known->held.push_back(parameter.storage());
    }
  }
  parameters_ = std::move(known);
}

SavedDigest SavedDigest::fresh() const { return SavedDigest(parameters_); }

bool SavedDigest::add(const at::Tensor& tensor) {
  if (!is_comparable(tensor)) {
    return false;
  }
  digest_.add(static_cast<std::uint64_t>(tensor.scalar_type()) | (tensor.is_conj() ? 256U : 0U) |
              (tensor.is_neg() ? 512U : 0U));
  digest_.add(static_cast<std::uint64_t>(tensor.dim()));
  digest_.add(tensor.sizes().data(), tensor.dim() * static_cast<Bytes>(sizeof(std::int64_t)));
  digest_.add(tensor.strides().data(), tensor.dim() * static_cast<Bytes>(sizeof(std::int64_t)));
  ++count_;
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto parameter = parameters_->number.find(storage);
  if (parameter != parameters_->number.end() || page_of(tensor) != nullptr) {
    const bool own = parameter != parameters_->number.end();
    digest_.add(own ? parameter->second : reinterpret_cast<std::uintptr_t>(storage));
    digest_.add(static_cast<std::uint64_t>(tensor.storage_offset()));
  } else if (tensor.numel() > 0 && !tensor.is_meta() && !tensor._is_zerotensor()) {
    if (tensor.is_cpu()) {
      add_numbers(digest_, tensor);
    } else {
      on_devices_.push_back(reduced_by_place(tensor));
    }
  }
  return true;
}

bool SavedDigest::equals(const SavedDigest& other) const {
  if (count_ != other.count_ || digest_.value() != other.digest_.value() ||
      on_devices_.size() != other.on_devices_.size()) {
    return false;
  }
  return on_devices_.empty() || at::stack(on_devices_).cpu().equal(at::stack(other.on_devices_).cpu());
}

at::Tensor reduced_by_place(const at::Tensor& tensor) {
  const at::AutoDispatchBelowAutograd numbers_only;
  at::Tensor sum = at::zeros({}, tensor.options().dtype(at::kLong));
  if (add_by_kernel == nullptr || !add_by_kernel(tensor, sum)) {
    add_by_place(tensor, 0, sum);
  }
  return sum;
}

void set_add_by_place(AddByPlace add) noexcept { add_by_kernel = add; }

}  // namespace hydra
