// The blocks of one model: their parameters, with both faces, and the backing of each block on the host.
//
// Owns the parameters. The pager owns the backings, and has to be destroyed before this object. Blocks are added before
// the first window and never removed. close() takes the faces' bytes away for good. Threads: any may read.
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
  /// Faces live on `device`. `face_dtype`: the dtype of floating-point faces; by default that of the host.
  ModelBlocks(std::shared_ptr<HostArena> arena, c10::Device device, std::optional<at::ScalarType> face_dtype);
  ModelBlocks(const ModelBlocks&) = delete;
  ModelBlocks& operator=(const ModelBlocks&) = delete;

  /// Makes faces for a block's parameters, calls `prepare` with each, and then moves their bytes into the arena.
  std::unique_ptr<BlockBacking> add(std::string name, const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                                    const std::weak_ptr<PagedModel>& owner,
                                    const std::function<void(HostParameter&)>& prepare);
  /// Makes all faces absent for good.
  void close() noexcept;

  /// The model of all blocks. Faces and withheld tensors refer to it.
  const std::weak_ptr<PagedModel>& owner() const noexcept { return owner_; }
  /// All parameters, in the order in which they were added.
  const std::vector<std::unique_ptr<HostParameter>>& parameters() const noexcept { return parameters_; }
  const std::vector<HostParameter*>& parameters_of(std::int32_t block) const { return backing(block).parameters(); }
  const std::vector<BlockBacking*>& backings() const noexcept { return backings_; }
  BlockBacking& backing(std::int32_t block) const { return *backings_[static_cast<std::size_t>(block)]; }
  const std::string& name(std::int32_t block) const { return names_[static_cast<std::size_t>(block)]; }
  std::vector<at::Tensor> faces() const;
  /// Whether each face requires a gradient, in the order of parameters(): '1' or '0'.
  std::string trained() const;
  /// Sets what trained() returns. Hosts follow when the window closes.
  void set_trained(const std::string& trained);
  /// The bytes of parameters that could not be moved into the arena.
  Bytes foreign_bytes() const noexcept;
  /// The groups of blocks whose parameters overlap in memory. Their updates have to run in the optimizer's order.
  /// `others`: parameters outside the model, which count as block -1.
  std::vector<BlockList> overlapping(const std::vector<at::Tensor>& others) const;

 private:
  std::unique_ptr<HostParameter> make_parameter(const std::string& name, const at::Tensor& host) const;

  SharedHost shared_;
  c10::Device device_;
  std::optional<at::ScalarType> face_dtype_;
  std::weak_ptr<PagedModel> owner_;
  std::vector<std::unique_ptr<HostParameter>> parameters_;
  std::vector<BlockBacking*> backings_;  // owned by the pager
  std::vector<std::string> names_;
};

}  // namespace hydra
