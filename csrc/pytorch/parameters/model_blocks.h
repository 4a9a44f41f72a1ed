// The blocks of one model: their parameters, with both faces, and what stands behind each block on the host.
//
// Owns the parameters. A block's backing is the pager's, which has to end before this. Blocks are added before the
// first window and never removed; close() takes the faces' bytes away for good. Threads: reading from any.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/pytorch/parameters/block_backing.h"

namespace hydra {

using BlockList = std::vector<std::int32_t>;

class ModelBlocks {
 public:
  /// Faces live on `device`; those of floating-point parameters have `face_dtype`, the host's unless set.
  ModelBlocks(std::shared_ptr<HostArena> arena, c10::Device device, std::optional<at::ScalarType> face_dtype);
  ModelBlocks(const ModelBlocks&) = delete;
  ModelBlocks& operator=(const ModelBlocks&) = delete;

  /// Makes faces for a block's parameters, calls `prepare` with each, and then moves their bytes into the arena.
  std::unique_ptr<BlockBacking> add(std::string name, const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                                    const std::weak_ptr<PagedModel>& owner,
                                    const std::function<void(HostParameter&)>& prepare);
  /// Faces show no bytes any more.
  void close() noexcept;

  /// The model that faces, and tensors whose bytes are elsewhere, lead to.
  const std::weak_ptr<PagedModel>& owner() const noexcept { return owner_; }
  /// In the order in which they were added.
  const std::vector<std::unique_ptr<HostParameter>>& parameters() const noexcept { return parameters_; }
  const std::vector<HostParameter*>& parameters_of(std::int32_t block) const { return backing(block).parameters(); }
  const std::vector<BlockBacking*>& backings() const noexcept { return backings_; }
  BlockBacking& backing(std::int32_t block) const { return *backings_[static_cast<std::size_t>(block)]; }
  const std::string& name(std::int32_t block) const { return names_[static_cast<std::size_t>(block)]; }
  std::vector<at::Tensor> faces() const;
  /// Bytes of parameters that could not be moved into the arena.
  Bytes foreign_bytes() const noexcept;
  /// Groups of blocks whose parameters overlap in memory; their updates have to be made in the optimizer's order. Of
  /// `others`, parameters outside the model, the block is -1.
  std::vector<BlockList> overlapping(const std::vector<at::Tensor>& others) const;

 private:
  std::unique_ptr<HostParameter> make_parameter(const std::string& name, const at::Tensor& host) const;

  std::shared_ptr<HostArena> arena_;
  c10::Device device_;
  std::optional<at::ScalarType> face_dtype_;
  std::weak_ptr<PagedModel> owner_;
  std::vector<std::unique_ptr<HostParameter>> parameters_;
  std::vector<BlockBacking*> backings_;  // owned by the pager
  std::vector<std::string> names_;
};

}  // namespace hydra
