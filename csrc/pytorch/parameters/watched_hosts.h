// A registry of host parameters that are watched: operations on them take the fault path although their bytes are on
// the host, so that a log can copy the bytes before a write.
//
// Parameters are found by their storage, so views count too. A view that was made before add() has no fault key, and
// is not noticed. Several logs may watch one parameter. Thread-safe.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "csrc/pytorch/parameters/host_parameter.h"

namespace hydra {

class PagedModel;

namespace watched_hosts {

/// A watched parameter, which lives as long as its model.
using Found = std::pair<std::shared_ptr<PagedModel>, HostParameter*>;

/// Gives the host the fault key. Call remove() with the same storage.
void add(const std::weak_ptr<PagedModel>& owner, HostParameter& parameter);
/// Removes the host's fault key if it still has the storage, unless that is watched by others or withheld.
void remove(const at::Tensor& host, const HostParameter* parameter, const c10::StorageImpl* storage) noexcept;
bool includes(const c10::StorageImpl* storage) noexcept;
/// The watched parameters that have the tensor's storage.
std::vector<Found> with_storage_of(const at::Tensor& tensor);

}  // namespace watched_hosts
}  // namespace hydra
