#include "csrc/pytorch/parameters/model_blocks.h"

#include <algorithm>
#include <set>

#include "csrc/pytorch/parameters/withheld.h"

namespace hydra {

ModelBlocks::ModelBlocks(std::shared_ptr<HostArena> arena, c10::Device device, std::optional<at::ScalarType> face_dtype)
    : shared_{.arena = std::move(arena)}, device_(device), face_dtype_(face_dtype) {}

std::unique_ptr<BlockBacking> ModelBlocks::add(std::string name,
                                               const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                                               const std::weak_ptr<PagedModel>& owner,
                                               const std::function<void(HostParameter&)>& prepare) {
  owner_ = owner;
  std::vector<HostParameter*> members;
  for (const auto& [parameter_name, host] : parameters) {
    auto parameter = make_parameter(parameter_name, host);
    prepare(*parameter);
    members.push_back(parameter.get());
    parameters_.push_back(std::move(parameter));
  }
  auto backing = std::make_unique<BlockBacking>(std::move(members), shared_);
  backings_.push_back(backing.get());
  names_.push_back(std::move(name));
  return backing;
}

std::unique_ptr<HostParameter> ModelBlocks::make_parameter(const std::string& name, const at::Tensor& host) const {
  auto parameter = std::make_unique<HostParameter>();
  parameter->name = name;
  parameter->host = host;
  parameter->host_dtype = host.scalar_type();
  parameter->page = c10::make_intrusive<Page>();
  parameter->page->name = name;
  parameter->page->device = device_;
  parameter->page->block = static_cast<std::int32_t>(backings_.size());
  parameter->page->owner = owner_;
  const bool casts = face_dtype_ && at::isFloatingType(host.scalar_type());
  parameter->face = make_paged_tensor(parameter->page, host, casts ? *face_dtype_ : host.scalar_type());
  parameter->paged = parameter->face.detach();
  parameter->face.set_requires_grad(host.requires_grad());
  parameter->trained_seen = host.requires_grad();
  return parameter;
}

void ModelBlocks::close() noexcept {
  for (const auto& parameter : parameters_) {
    withdraw(*parameter->page, "belonged to an offload context that has ended");
  }
}

std::vector<at::Tensor> ModelBlocks::faces() const {
  std::vector<at::Tensor> faces;
  for (const auto& parameter : parameters_) {
    faces.push_back(parameter->face);
  }
  return faces;
}

std::string ModelBlocks::trained() const {
  std::string trained(parameters_.size(), '0');
  std::ranges::transform(parameters_, trained.begin(),
                         [](const auto& each) { return each->face.requires_grad() ? '1' : '0'; });
  return trained;
}

void ModelBlocks::set_trained(const std::string& trained) {
  HYDRA_EXPECT(trained.size() == parameters_.size(), StateError, "there is a flag for each parameter");
  for (std::size_t i = 0; i < trained.size(); ++i) {
    at::Tensor& face = parameters_[i]->face;
    if (face.requires_grad() != (trained[i] == '1')) {
      face.set_requires_grad(trained[i] == '1');
    }
  }
}

Bytes ModelBlocks::foreign_bytes() const noexcept {
  Bytes bytes = 0;
  for (const BlockBacking* backing : backings_) {
    bytes += backing->foreign_bytes();
  }
  return bytes;
}

std::vector<BlockList> ModelBlocks::overlapping(const std::vector<at::Tensor>& others) const {
  std::vector<std::pair<HostExtent, std::int32_t>> extents;
  for (const auto& parameter : parameters_) {
    extents.emplace_back(parameter->extent(), parameter->page->block);
  }
  for (const at::Tensor& other : others) {
    if (!withheld_of(other)) {
      const auto* const begin = static_cast<const std::byte*>(other.const_data_ptr());
      extents.emplace_back(HostExtent{begin, begin + other.nbytes()}, -1);
    }
  }
  std::erase_if(extents, [](const auto& each) { return each.first.begin == each.first.end; });
  std::sort(extents.begin(), extents.end(),
            [](const auto& one, const auto& other) { return one.first.begin < other.first.begin; });
  std::vector<BlockList> groups;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    std::set<std::int32_t> group{extents[i].second};
    HostExtent joined = extents[i].first;
    for (; i + 1 < extents.size() && joined.overlaps(extents[i + 1].first); ++i) {
      group.insert(extents[i + 1].second);
      joined.end = std::max(joined.end, extents[i + 1].first.end);
    }
    if (group.size() > 1) {
      groups.emplace_back(group.begin(), group.end());
    }
  }
  return groups;
}

}  // namespace hydra
