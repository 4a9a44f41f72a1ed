#include "csrc/paging/block_table.h"

#include <utility>

#include "csrc/base/errors.h"

namespace hydra {

std::int32_t BlockTable::add(std::string name, Bytes bytes, std::unique_ptr<BlockClient> client) {
  HYDRA_EXPECT(bytes > 0, StateError, "block '" + name + "' has no bytes to page");
  const Lock held = lock();
  const auto index = static_cast<std::int32_t>(blocks_.size());
  blocks_.push_back(std::make_unique<PagedBlock>(index, std::move(name), bytes, std::move(client)));
  return index;
}

PagedBlock& BlockTable::at(std::int32_t block) const {
  HYDRA_EXPECT(block >= 0 && static_cast<std::size_t>(block) < blocks_.size(), StateError,
               "block " + std::to_string(block) + " was asked for; there are " + std::to_string(blocks_.size()));
  return *blocks_[static_cast<std::size_t>(block)];
}

}  // namespace hydra
