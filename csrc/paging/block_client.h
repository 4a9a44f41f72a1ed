// The pager's interface to the owner of a block's pages and of their backing.
//
// The backing is host memory or the disk, which only the client knows. `publish` and `withdraw` run under the pager's
// lock: they set pointers and nothing else. The jobs that `fill` and `write_back` return own everything they need.
#pragma once

#include "csrc/transfer/lane.h"

namespace hydra {

class BlockClient {
 public:
  virtual ~BlockClient() = default;

  /// The copy that fills `slot` from the backing.
  virtual Job fill(void* slot) = 0;
  /// The copy that writes `slot` back. Called only after mark_dirty().
  virtual Job write_back(void* slot) = 0;
  /// The pages are readable at `slot` from now on.
  virtual void publish(void* slot) noexcept = 0;
  /// The pages are absent from now on; reading them raises.
  virtual void withdraw() noexcept = 0;
};

}  // namespace hydra
