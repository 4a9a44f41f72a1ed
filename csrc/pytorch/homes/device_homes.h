// Blocks whose home is the device: weights, gradients and optimizer state stay there and are updated there; nothing of
// them moves.
//
// The block's slot holds the weights and is the truth; the optimizer's state and the gradients lie beside it. The host
// tensors that the user knows (parameters, `.grad`, state) have no bytes meanwhile: an operation on one of them brings
// the whole block home to the host, where it is an ordinary block again. So only time tells which home a block
// has. That may happen at any moment, in the middle of a backward or of a step, and in any thread: only
// this class keeps an address of what is at home here.
//
// Threads: any; one mutex, under which no memory is asked for that homes may have to make room for, and no tensor ends.
// Calls that wait for a lane are made without the interpreter lock. Lane errors are thrown, and the block stays where
// it was.
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
  std::int64_t settled = 0;   // blocks that moved to the device, and
  std::int64_t returned = 0;  // those that came back
  Bytes moved_bytes = 0;      // both ways
};

/// A number that multiplies tensors as it would in Python.
at::Tensor python_number(double value);

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
  /// What is at home on the device is lost; its host tensors say so from now on.
  void abandon() noexcept;

  bool any() const;
  bool holds(std::int32_t block) const;
  std::vector<std::int32_t> blocks() const;

  /// A part of the parameter's gradient, from the device, is added to what is there. False if it has to go to the host;
  /// then the parameter's block has gone there before.
  bool keep_gradient(HostParameter& parameter, const at::Tensor& part);
  /// The gradient at home of this parameter; undefined when there is none. It is not to be written to, and may not be
  /// the parameter's any more when this has returned.
  at::Tensor gradient(const HostParameter& parameter);
  /// It becomes this one. False when the parameter has none that is at home.
  bool replace_gradient(const HostParameter& parameter, const at::Tensor& gradient);
  /// In place, as mul_(). False when the bytes of this `.grad` are not at home on the device.
  bool multiply_gradient(const at::Tensor& host, double factor);
  /// Of those of these host tensors that are gradients at home; see norm.h.
  std::vector<std::optional<double>> sums_of_squares(const std::vector<at::Tensor>& hosts, ThreadPool& pool);
  /// Before a window opens: gradients without another owner are freed, and blocks that were given host
  /// tensors are brought home.
  void review();

  /// Runs a block's part of an optimizer step on the device; in threads of `pool` where the device's memory is the
  /// host's. False, and nothing has happened, unless all tensors of the plan are at home there.
  bool update(std::int32_t block, const TensorPlan& plan, ThreadPool& pool, float scale);
  HomeStatistics statistics() const;

 private:
  struct Member {
    HostParameter* parameter = nullptr;
    WithheldTensor weights;
    at::Tensor gradient;  // on the device
    c10::Storage shown;   // of the host's `.grad` that stands for it
    FencePtr written;     // the gradient's last write
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
  /// What has left, and ends when the lock is gone.
  struct Departed {
    std::vector<std::unique_ptr<Home>> homes;
    std::vector<at::Tensor> gradients;
    std::vector<c10::Storage> storages;
  };
  struct Return;

  Home* find_locked(std::int32_t block) const;
  /// Null when the device is not the home of the parameter.
  Member* member_locked(const HostParameter& parameter) const;
  /// Null unless this is the `.grad` of a parameter at home, and stands for a gradient there.
  Member* shown_by_locked(const at::Tensor& host) const;
  void bring_home_locked(std::int32_t block, Departed& departed);
  Return plan_return_locked(std::int32_t block, Home& home) const;
  bool reviewed_locked(Home& home, Departed& departed);
  /// Moves the bytes and waits. Throws the lane's error.
  void move(Lane& lane, std::vector<Segment> segments, std::vector<FencePtr> after);
  /// Blocks until no compute writes its memory on the device.
  static void wait_for_compute(const Home& home) noexcept;
  void release_locked(Home& home) noexcept;

  DeviceBackend& backend_;
  DeviceMath* math_;  // of a device whose memory is not the host's; else null
  Pager& pager_;
  Resource& memory_;
  std::shared_ptr<HostArena> arena_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Home>> homes_;  // by block
  HomeStatistics statistics_;
};

}  // namespace hydra
