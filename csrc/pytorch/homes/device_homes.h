// Blocks whose home is the device. Their weights, gradients and optimizer state stay on the device and are updated
// there.
//
// The block's slot has the weights and is the truth. The optimizer's state and the gradients are in other memory of the
// device. Meanwhile the user's host tensors (parameters, `.grad`, state) have no bytes. An operation on one of them
// brings the whole block to the host, where it is an ordinary block again. That can happen at any moment: in the middle
// of a backward or of a step, and on any thread. So no other class keeps an address of memory at home here.
//
// Owns the memory of states and gradients, and references to the host tensors.
// Threads: any; one mutex. Under it no memory is allocated that these homes may have to make room for, and no tensor is
// destroyed. Calls that wait for a lane are made without the interpreter lock. Errors of lanes are thrown, and the
// block stays where it was. Sizes are bytes.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "csrc/memory/limited_resource.h"
#include "csrc/optim/device_math.h"
#include "csrc/paging/pager.h"
#include "csrc/pytorch/parameters/block_backing.h"
#include "csrc/pytorch/parameters/tensor_plan.h"
#include "csrc/pytorch/parameters/withheld.h"

namespace hydra {

struct HomeStatistics {
  std::int64_t settled = 0;   // blocks that moved to the device
  std::int64_t returned = 0;  // blocks that moved back to the host
  Bytes moved_bytes = 0;      // in both directions
};

/// Makes a number that multiplies tensors as a Python number does.
at::Tensor python_number(double value);

class DeviceHomes {
 public:
  /// Allocates optimizer state from `memory`. `backend`, `pager` and `memory` have to outlive the homes.
  DeviceHomes(DeviceBackend& backend, Pager& pager, Resource& memory, std::shared_ptr<HostArena> arena);

  /// Moves a block, whose host tensors have their bytes, and its optimizer's `state` to the device. Returns false, and
  /// changes nothing, if there is no room or a tensor cannot move. Called outside windows.
  bool settle(std::int32_t block, const BlockBacking& backing, const std::vector<at::Tensor>& state,
              const std::weak_ptr<PagedModel>& owner);
  /// Brings the block to the host. Does nothing if it is there.
  void bring_home(std::int32_t block);
  /// Brings all blocks to the host.
  void bring_home();
  /// Makes room: brings the block that is needed last to the host. Returns false if there is no block.
  bool give_one_up();
  /// Drops all memory at home on the device. Operations on its host tensors raise from now on.
  void abandon() noexcept;

  bool any() const;
  bool holds(std::int32_t block) const;
  std::vector<std::int32_t> blocks() const;

  /// Adds a part of the parameter's gradient, from the device, to the gradient at home. Returns false if the part has
  /// to go to the host; the parameter's block is on the host then.
  bool keep_gradient(HostParameter& parameter, const at::Tensor& part);
  /// Returns the parameter's gradient at home, or an undefined tensor. The caller must not write to it. It may cease to
  /// be the parameter's gradient at any time.
  at::Tensor gradient(const HostParameter& parameter);
  /// Copies `gradient` to the parameter's gradient at home. Returns false if it has none.
  bool replace_gradient(const HostParameter& parameter, const at::Tensor& gradient);
  /// Multiplies a gradient in place, as mul_() does. Returns false if the bytes of this `.grad` are not at home here.
  bool multiply_gradient(const at::Tensor& host, double factor);
  /// Returns the sums of squares (norm.h) of those host tensors that are gradients at home, and nullopt for the others.
  std::vector<std::optional<double>> sums_of_squares(const std::vector<at::Tensor>& hosts, ThreadPool& pool);
  /// Called before a window opens. Frees gradients that the user has dropped. Brings to the host the blocks whose host
  /// tensors were given other bytes, and those whose gradients were replaced but are still in use.
  void review();

  /// Runs a block's part of an optimizer step on the device; on threads of `pool` if the device's memory is the
  /// host's. Returns false, and does nothing, unless all tensors of the plan are at home here.
  bool update(std::int32_t block, const TensorPlan& plan, ThreadPool& pool, float scale);
  HomeStatistics statistics() const;

 private:
  struct Member {
    HostParameter* parameter = nullptr;
    WithheldTensor weights;
    at::Tensor gradient;  // on the device
    c10::Storage shown;   // the storage of the `.grad` on the host that stands for the gradient
    FencePtr written;     // behind the gradient's last write
  };
  struct State {
    WithheldTensor tensor;
    Bytes offset = 0;
  };
  struct Home {
    std::vector<Member> members;
    std::vector<State> states;
    std::byte* slot = nullptr;
    void* memory = nullptr;
    Bytes memory_bytes = 0;
    FencePtr updated;  // behind the last update, on its stream
  };
  /// Objects that have left these homes. They are destroyed without the lock.
  struct Departed {
    std::vector<std::unique_ptr<Home>> homes;
    std::vector<at::Tensor> gradients;
    std::vector<c10::Storage> storages;
  };
  struct Return;

  Home* find_locked(std::int32_t block) const;
  /// Returns null if the device is not the home of the parameter.
  Member* member_locked(const HostParameter& parameter) const;
  /// Returns the member whose `.grad` is `host` and stands for a gradient at home, or null.
  Member* shown_by_locked(const at::Tensor& host) const;
  void bring_home_locked(std::int32_t block, Departed& departed);
  Return plan_return_locked(std::int32_t block, Home& home) const;
  bool reviewed_locked(Home& home, Departed& departed);
  /// Moves the bytes and waits for them. Throws the lane's error.
  void move(Lane& lane, std::vector<Segment> segments, std::vector<FencePtr> after);
  /// Blocks until no compute writes the home's memory on the device.
  static void wait_for_compute(const Home& home) noexcept;
  void release_locked(Home& home) noexcept;
  /// As sums_of_squares(). Throws OutOfMemory, without the lock, if the device has no memory for the sums.
  std::vector<std::optional<double>> sums_at_home(const std::vector<at::Tensor>& hosts, ThreadPool& pool);

  DeviceBackend& backend_;
  DeviceMath* math_;  // null if the host can compute on the device's memory
  Pager& pager_;
  Resource& memory_;
  std::shared_ptr<HostArena> arena_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Home>> homes_;  // indexed by block
  HomeStatistics statistics_;
};

}  // namespace hydra
