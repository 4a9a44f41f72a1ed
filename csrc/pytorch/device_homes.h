// Blocks whose home is the device: weights, gradients and optimizer state stay there and are updated there; nothing of
// them moves.
//
// The block's slot holds the weights and is the truth, memory beside it the optimizer's state, the faces' `.grad` the
// gradients. The host tensors that the user knows (parameters, `.grad`, state) have no bytes meanwhile: an operation
// on one of them brings the whole block home to the host, where it is an ordinary block again. So nobody sees which
// home a block has but by the time it takes.
//
// Threads: any; one mutex. Calls that wait for a lane are made without the interpreter lock. Lane errors are thrown,
// and the block stays where it was.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/memory/limited_resource.h"
#include "csrc/optim/device_math.h"
#include "csrc/paging/pager.h"
#include "csrc/pytorch/block_backing.h"
#include "csrc/pytorch/withheld.h"

namespace hydra {

struct HomeStatistics {
  std::int64_t settled = 0;   // blocks that moved to the device, and
  std::int64_t returned = 0;  // those that came back
  Bytes moved_bytes = 0;      // both ways
};

/// In place, with the bits of tensor.mul_(factor) in Python.
void multiply_as_python_does(const at::Tensor& tensor, double factor);

class DeviceHomes {
 public:
  /// `owner` is whose blocks they are; `memory` holds optimizer state. All have to outlive the homes.
  DeviceHomes(DeviceBackend& backend, Pager& pager, Resource& memory, std::shared_ptr<HostArena> arena);

  /// Moves a block, whose host tensors have their bytes, and its optimizer's `state` to the device. False, and nothing
  /// has changed, when there is no room. Outside windows.
  bool settle(std::int32_t block, const BlockBacking& backing, const std::vector<at::Tensor>& state,
              const std::weak_ptr<PagedModel>& owner);
  /// Everything of the block is on the host again; nothing happens when it is.
  void bring_home(std::int32_t block);
  void bring_home();
  /// For room: the block that is needed last. False when there is none.
  bool give_one_up();

  bool holds(std::int32_t block) const;
  std::vector<std::int32_t> blocks() const;
  /// The gradient that the face of `parameter` has got stays there. False if it has to go to the host; then the
  /// parameter's block has gone there, too.
  bool keep_gradient(HostParameter& parameter);
  /// The gradient at home of this parameter, to be changed in place; undefined when there is none.
  at::Tensor gradient(HostParameter& parameter);
  /// It becomes this one. False when the device is not the home of the parameter.
  bool put_gradient(HostParameter& parameter, const at::Tensor& gradient);
  /// Before a window opens: gradients that nobody knows any more are freed, and blocks that somebody has given host
  /// tensors are brought home.
  void review();

  /// Runs a block's part of an optimizer step, whose plan was made of home_data(), on the device; in threads of `pool`
  /// where the device's memory is the host's.
  void update(std::int32_t block, const StepPlan& plan, ThreadPool& pool, float scale);
  /// The arithmetic of a device whose memory is not the host's; else null.
  DeviceMath* math() const noexcept { return math_; }
  /// In place, as mul_(). False when the bytes of this `.grad` are not at home on the device.
  bool multiply_gradient(const at::Tensor& host, double factor);
  HomeStatistics statistics() const;

 private:
  struct Member {
    HostParameter* parameter = nullptr;
    WithheldTensor weights;
    c10::Storage gradient;  // of the host's `.grad`, as long as the face's stands for it
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
    FencePtr updated;  // the last update, on whatever stream it ran
  };

  Home* find_locked(std::int32_t block) const;
  /// Null when the device is not the home of the parameter.
  Member* member_locked(const HostParameter& parameter) const;
  void bring_home_locked(std::int32_t block);
  bool reviewed_locked(Home& home);
  /// Moves the bytes and waits. Throws the lane's error.
  void move(Lane& lane, std::vector<Segment> segments, FencePtr after = nullptr);
  void release_locked(Home& home) noexcept;

  DeviceBackend& backend_;
  DeviceMath* math_;
  Pager& pager_;
  Resource& memory_;
  std::shared_ptr<HostArena> arena_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Home>> homes_;  // by block
  HomeStatistics statistics_;
};

}  // namespace hydra
