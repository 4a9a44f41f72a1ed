// The numbers that one training step overwrites in the parameters of one model, so that the step can be undone.
//
// Faces tell of writes by the fault path and at the end of a window. Host parameters are watched meanwhile, because the
// user's function writes to them outside the model's windows. `.data = ...` of a host is no operation: take() finds it.
// Another model may belong to another thread, which trains it: there only writes of the step's own threads count. These
// are the thread that made the log, the microbatches' threads, and those of autograd that work for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/pytorch/parameters/host_parameter.h"

namespace hydra {

class PagedModel;

/// A parameter that was written to.
struct Overwritten {
  std::string name;
  at::Tensor host;
  at::Tensor before;  // its numbers before the first write, on the host
};

/// Threads: the constructor, watch(), take() and the destructor on the step's thread; others on any.
class OverwrittenLog {
 public:
  /// `is_own`: whether the step trains this model, so that writes of all threads count.
  OverwrittenLog(std::weak_ptr<PagedModel> owner, bool is_own);
  OverwrittenLog(const OverwrittenLog&) = delete;
  OverwrittenLog& operator=(const OverwrittenLog&) = delete;
  ~OverwrittenLog();

  /// Watches the host. `present` has its memory, and keeps it when the user gives the host another one.
  void watch(HostParameter& parameter, at::Tensor present);
  /// The parameters that were written to since the last call, with their numbers from before the first write.
  std::vector<Overwritten> take();

  /// Whether writes of this thread count.
  bool concerns_this_thread() const;
  bool has(const HostParameter& parameter) const;
  void add(const HostParameter& parameter, const at::Tensor& before);
  /// Notes that this thread enters the model.
  void note_entry();
  /// Whether other threads have entered the model, and the step's have not.
  bool is_elsewhere() const;

 private:
  struct Watch {
    at::Tensor host;
    at::Tensor present;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // a storage that others count is not referred to
  };
  const c10::StorageImpl* storage_of(const Watch& watch) const { return watch.storage._unsafe_get_target(); }
  void find_replaced();

  const std::weak_ptr<PagedModel> owner_;
  const bool is_own_;
  const std::string mark_;  // of the step's threads, in torch's thread-local state
  std::map<HostParameter*, Watch> watches_;
  mutable std::mutex mutex_;
  std::map<const HostParameter*, Overwritten> kept_;
  bool entered_here_ = false;
  bool entered_elsewhere_ = false;
};

}  // namespace hydra
