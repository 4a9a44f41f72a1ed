#include "csrc/pytorch/parameters/face_writes.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <vector>

#include "csrc/pytorch/parameters/host_parameter.h"

namespace hydra {

namespace {

std::vector<FaceWrites*>& of_this_thread() {
  thread_local std::vector<FaceWrites*> active;
  return active;
}

}  // namespace

void FaceWrites::begin() {
  of_this_thread().push_back(this);
  active_ = true;
}

void FaceWrites::end() noexcept {
  if (active_) {
    std::erase(of_this_thread(), this);
    active_ = false;
  }
}

void FaceWrites::undo() {
  const at::NoGradGuard no_grad;
  for (const auto& [parameter, write] : writes_) {
    write.face.variable_data().copy_(write.before);  // which bumps no version of the face
    c10::VariableVersion counter = write.face.unsafeGetTensorImpl()->version_counter();  // the same one
    counter.set_version(write.version);
  }
  writes_.clear();
}

void FaceWrites::note(const HostParameter& parameter) {
  for (FaceWrites* const active : of_this_thread()) {
    if (!active->writes_.contains(&parameter)) {
      const auto version = parameter.face.unsafeGetTensorImpl()->version_counter().current_version();
      active->writes_.emplace(
          &parameter, FaceWrite{parameter.face, static_cast<std::uint32_t>(version), numbers_on_host(parameter.paged)});
    }
  }
}

}  // namespace hydra
