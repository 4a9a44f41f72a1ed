#include "csrc/pytorch/parameters/host_parameter.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>

#include "csrc/base/host_work.h"
#include "csrc/io/spill_file.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/parameters/withheld.h"

namespace hydra {

namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kLines = 16;

std::uint64_t mix(std::uint64_t hash, std::uint64_t word) noexcept {
  hash ^= word;
  hash *= 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 29);
}

std::uint64_t hash_line(std::uint64_t hash, const std::byte* line, std::size_t bytes) noexcept {
  for (std::size_t i = 0; i < bytes; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, line + i, std::min<std::size_t>(8, bytes - i));
    hash = mix(hash, word);
  }
  return hash;
}

/// Hashes evenly spaced cache lines, including the first and the last; of small tensors, all bytes.
std::uint64_t fingerprint(const std::byte* data, std::size_t bytes) noexcept {
  if (bytes <= kLine * kLines) {
    return hash_line(bytes, data, bytes);
  }
  std::uint64_t hash = bytes;
  for (std::size_t i = 0; i < kLines; ++i) {
    hash = hash_line(hash, data + (bytes - kLine) * i / (kLines - 1), kLine);
  }
  return hash;
}

std::string shape_of(const at::Tensor& tensor) {
  return std::string(c10::toString(tensor.scalar_type())) + c10::str(tensor.sizes());
}

}  // namespace

bool HostParameter::withheld() const {
  return (withheld_data != nullptr || went_to_disk) && shows(host, withheld_storage);
}

void HostParameter::note_withheld(bool to_disk) {
  went_to_disk = to_disk || on_disk();
  withheld_data = went_to_disk ? nullptr : host_data();
  withheld_storage = host.storage();
}

void HostParameter::note_given_back() {
  withheld_data = nullptr;
  went_to_disk = false;
  withheld_storage = {};
}

void HostParameter::note_came_home() {
  note_given_back();
  data_seen = host_data();
  if (data_seen != nullptr) {
    fingerprint_seen = fingerprint(host_data(), static_cast<std::size_t>(host_bytes()));
  }
}

void HostParameter::note_moved() {
  moved = true;
  if (version() != version_seen) {
    version_seen = version();
    face.unsafeGetTensorImpl()->bump_version();  // backwards of older graphs have to raise
  }
}

bool HostParameter::lent(const at::Tensor& gradient) const {
  const auto storage = lent_gradient.lock();
  return storage && gradient.defined() && gradient.has_storage() && is_whole(gradient) &&
         gradient.storage().unsafeGetStorageImpl() == storage.get();
}

std::byte* HostParameter::host_data() const {
  if (withheld()) {
    return withheld_data;
  }
  auto* storage = host.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage->_mutable_data_ptr_no_checks().get() == nullptr) {
    return nullptr;
  }
  return static_cast<std::byte*>(storage->_mutable_data_ptr_no_checks().get()) +
         host.storage_offset() * static_cast<std::int64_t>(host.itemsize());
}

HostExtent HostParameter::extent() const {
  const std::byte* const begin = host_data();
  return begin == nullptr ? HostExtent() : HostExtent{begin, begin + host_bytes()};
}

HostExtent HostParameter::reach() const {
  const HostExtent own = extent();
  if (own.begin == nullptr || withheld()) {
    return own;
  }
  const c10::Storage& storage = host.storage();
  const auto* const begin = static_cast<const std::byte*>(storage.data());
  return {begin, begin + storage.nbytes()};
}

std::uint32_t HostParameter::version() const {
  return static_cast<std::uint32_t>(host.unsafeGetTensorImpl()->version_counter().current_version());
}

std::string HostParameter::mismatch() const {
  if (!host.device().is_cpu()) {
    return "'" + name + "' is on " + host.device().str();
  }
  if (host.scalar_type() != host_dtype) {
    return "'" + name + "' is " + c10::toString(host.scalar_type()) + ", was " + c10::toString(host_dtype);
  }
  if (host.sizes() != face.sizes() || host.strides() != face.strides()) {
    return "'" + name + "' is " + shape_of(host) + ", was " + shape_of(face) + ", or has other strides";
  }
  return {};
}

bool HostParameter::changed_since_seen() {
  if (version() != version_seen) {
    face.unsafeGetTensorImpl()->bump_version();  // any difference is what autograd looks for
    return true;
  }
  if (moved) {
    return true;
  }
  if (withheld()) {
    return false;
  }
  const std::byte* data = host_data();
  const bool changed = data == nullptr || data != data_seen ||
                       fingerprint(data, static_cast<std::size_t>(host_bytes())) != fingerprint_seen;
  page->silent_writes += changed ? 1 : 0;
  return changed;
}

void HostParameter::note_seen() {
  version_seen = version();
  moved = false;
  if (withheld()) {
    return;
  }
  data_seen = host_data();
  if (data_seen != nullptr) {
    fingerprint_seen = fingerprint(host_data(), static_cast<std::size_t>(host_bytes()));
  }
}

at::Tensor HostParameter::gradient_buffer(const at::Tensor& gradient, const std::shared_ptr<HostArena>& arena) {
  const Bytes bytes = gradient.numel() * static_cast<std::int64_t>(host.itemsize());
  c10::Storage storage;
  if (gradient_buffers && bytes >= kLeastDiskBytes) {
    storage = storage_in(gradient_buffers->take(round_up(bytes, kDiskAlignment)), 0, bytes);
    lent_gradient = storage.getWeakStorageImpl();
  } else {
    if (!gradient_storage || gradient_storage.use_count() > 1 ||
        gradient_storage.nbytes() < static_cast<std::size_t>(bytes)) {
      gradient_storage = storage_in(std::make_shared<ArenaRegion>(arena, bytes), 0, bytes);
    }
    storage = gradient_storage;
  }
  at::Tensor buffer = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), host.dtype());
  buffer.unsafeGetTensorImpl()->set_sizes_and_strides(gradient.sizes(), gradient.strides());
  return buffer;
}

at::Tensor numbers_on_host(const at::Tensor& tensor) {
  // An operation of ours: neither autograd nor the user's modes see it, and no budget pays for it.
  const HostScope on_the_host;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  at::Tensor numbers = at::empty_like(tensor, tensor.options().device(at::kCPU));
  numbers.copy_(tensor);
  return numbers;
}

std::string why_not_pageable(const at::Tensor& host) {
  if (host.is_meta()) {
    return "is on the meta device and has no bytes; materialise it first";
  }
  if (host.layout() != at::kStrided) {
    return "is " + c10::str(host.layout()) + "; only dense parameters can be offloaded";
  }
  if (host.is_quantized()) {
    return "is quantised; de-quantise it or keep it out of the model";
  }
  if (!host.device().is_cpu()) {
    return "is on " + host.device().str() + "; build the model on the CPU";
  }
  if (!host.unsafeGetTensorImpl()->has_storage() || host.unsafeGetTensorImpl()->is_python_dispatch()) {
    return "is a tensor subclass without plain storage; only plain dense parameters can be offloaded";
  }
  if (!host.is_non_overlapping_and_dense()) {
    return "has strides that overlap or leave gaps; replace it by its .contiguous() copy";
  }
  return {};
}

bool adopt_into(const at::Tensor& host, const ArenaRegionPtr& region, Bytes offset) {
  const c10::Storage& storage = host.unsafeGetTensorImpl()->unsafe_storage();
  const bool sole = references_to(storage) == 1 && host.storage_offset() == 0 &&
                    storage.nbytes() == static_cast<std::size_t>(host.nbytes());
  c10::StorageImpl* implementation = storage.unsafeGetStorageImpl();
  if (!sole || !implementation->resizable() || c10::impl::cow::is_cow_data_ptr(storage.data_ptr())) {
    return false;
  }
  if (!host_work_taken(2 * static_cast<Bytes>(host.nbytes()))) {
    std::memcpy(region->data() + offset, storage.data(), static_cast<std::size_t>(host.nbytes()));
  }
  implementation->set_data_ptr_noswap(data_pointer_into(region, offset));
  return true;
}

}  // namespace hydra
