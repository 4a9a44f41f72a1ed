#include "csrc/pytorch/model/fault_path.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <vector>

#include "csrc/base/errors.h"
#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/parameters/derived_page.h"
#include "csrc/pytorch/parameters/fault_key.h"
#include "csrc/pytorch/parameters/page.h"
#include "csrc/pytorch/parameters/watched_hosts.h"
#include "csrc/pytorch/parameters/withheld.h"
#include "csrc/pytorch/threads/error_bridge.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

/// Pins inputs for the length of one operation, and unpins them on every way out.
class OperationPins {
 public:
  OperationPins() = default;
  OperationPins(const OperationPins&) = delete;
  OperationPins& operator=(const OperationPins&) = delete;
  ~OperationPins() {
    for (const auto& derived : derived_) {
      derived->unpin();
    }
    for (const auto& [model, block] : pins_) {
      model->pager().release(block, AcquireReason::kFault);
    }
  }

  void add(const Page& page, bool written, const c10::OperatorHandle& op) {
    std::shared_ptr<PagedModel> model = page.owner.lock();
    TORCH_CHECK(model != nullptr && !model->gate().closed(), "hydra_ext: ", c10::toString(op.operator_name()),
                " reads the device parameter '", page.name,
                "', but the offload context it belonged to has ended; use the model's own parameter");
    try {
      if (!model->gate().open()) {
        model->changes().synchronise_for_fault(page.block);  // a face that the user has kept
      }
      const ReleaseGilIfHeld released;
      model->pager().acquire(page.block, AcquireReason::kFault);
    } catch (const Error&) {
      rethrow_for_torch(model->arrivals().timeline().explain());
    }
    pins_.emplace_back(model, page.block);
    if (written) {
      model->changes().note_face_written(page);
    }
  }

  void add(DerivedPage& page, bool written) {
    page.pin(written);
    derived_.push_back(DerivedPagePtr::reclaim_copy(&page));
  }

 private:
  c10::SmallVector<DerivedPagePtr, 2> derived_;
  c10::SmallVector<std::pair<std::shared_ptr<PagedModel>, std::int32_t>, 4> pins_;
};

template <class Visit>
void each_tensor(const c10::IValue& value, const Visit& one) {
  if (value.isTensor()) {
    one(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      one(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      if (tensor) {
        one(*tensor);
      }
    }
  }
}

bool detaches_storage(const c10::OperatorName& name) {
  return name.name == "aten::set_" || name.name == "aten::resize_" || name.name == "aten::resize_as_" ||
         name.name == "aten::set_data" || name.name == "aten::swap_";
}

/// Whether this is a collective. It runs after the operation has returned, on a stream that is not known here.
bool communicates(const c10::OperatorName& name) {
  return name.name.starts_with("c10d::") || name.name.starts_with("_c10d_functional::");
}

void refuse_unsupported(const c10::OperatorName& name, const Page& page, bool written) {
  TORCH_CHECK(!(written && detaches_storage(name)), "hydra_ext: ", c10::toString(name),
              " would detach the device parameter '", page.name,
              "' from its storage; change the model's own parameter outside forward and backward instead");
  TORCH_CHECK(!communicates(name), "hydra_ext: ", c10::toString(name), " was given the device parameter '", page.name,
              "', which may leave the device before a collective has read it; communicate the model's own (host) "
              "parameter outside forward and backward, or a clone() inside");
}

bool casts_under_autocast(const c10::OperatorHandle& op) {
  if (op.operator_name().name != "aten::_to_copy") {
    return false;
  }
  // Autocast disables itself while it casts. Only the nesting depth of its regions still shows that it is active.
  const int depth = at::autocast::increment_nesting();
  at::autocast::decrement_nesting();
  return depth > 1;
}

/// Turns autocast's copy of a whole parameter in a smaller dtype into a derived page, whose bytes can be dropped.
void derive_copy(const at::Tensor& parameter, const Page& page, const at::Tensor& copy) {
  const std::shared_ptr<PagedModel> model = page.owner.lock();
  const bool whole = parameter.sizes() == copy.sizes() && parameter.storage_offset() == 0 &&
                     parameter.nbytes() == parameter.storage().nbytes();
  if (model && whole && copy.is_floating_point() && copy.itemsize() < parameter.itemsize()) {
    if (const DerivedPagePtr derived = derive(parameter, page, copy)) {
      model->arrivals().derived_pages().add(derived);
    }
  }
}

/// Tells logs that an operation is about to write this host parameter.
void note_host_written(const at::Tensor& tensor) {
  for (const auto& [model, parameter] : watched_hosts::with_storage_of(tensor)) {
    model->changes().note_host_written(*parameter);
  }
}

/// Brings the bytes of a withheld tensor to the host: an optimizer step uses them, or their home is elsewhere.
void bring_to_host(const Withheld& withheld, const c10::Storage& storage, const c10::OperatorHandle& op) {
  const std::shared_ptr<PagedModel> model = withheld.owner.lock();
  TORCH_CHECK(model != nullptr, "hydra_ext: ", c10::toString(op.operator_name()),
              " uses a tensor of an offload context that has ended in the middle of an optimizer step");
  TORCH_CHECK(!(model->changes().poisons() && model->gate().open()), "hydra_ext: ", c10::toString(op.operator_name()),
              " uses a host parameter, its gradient or its optimizer state inside forward or backward, while ",
              "Checks(poison_hosts=True) forbids it");
  const ReleaseGilIfHeld released;
  try {
    model->moves().bring_home(withheld.block, storage);
  } catch (const Error&) {
    rethrow_for_torch(model->arrivals().timeline().explain());
  }
}

void fault_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  OperationPins pins;
  const auto values = torch::jit::last(*stack, schema.arguments().size());
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    each_tensor(values[i], [&](const at::Tensor& tensor) {
      if (const Page* page = page_of(tensor)) {
        refuse_unsupported(op.operator_name(), *page, written);
        pins.add(*page, written, op);
        return;
      }
      if (const WithheldPtr withheld = withheld_of(tensor)) {
        bring_to_host(*withheld, tensor.storage(), op);
      } else if (DerivedPage* derived = derived_page_of(tensor)) {
        pins.add(*derived, written);
      }
      if (written) {
        note_host_written(tensor);
      }
    });
  }
  const at::Tensor cast_from = casts_under_autocast(op) && values[0].isTensor() ? values[0].toTensor() : at::Tensor();
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kFaultKey), stack);
  if (const Page* page = page_of(cast_from)) {
    derive_copy(cast_from, *page, torch::jit::peek(*stack, 0, 1).toTensor());
  }
}

/// Whether an operator needs no fault path: views read no bytes, and composites call operations that take it
/// themselves.
bool falls_through(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  bool view = false;
  bool writes = false;
  for (const c10::Argument& result : schema.returns()) {
    if (const c10::AliasInfo* alias = result.alias_info()) {
      (alias->isWrite() ? writes : view) = true;
    }
  }
  for (const c10::Argument& argument : schema.arguments()) {
    if (const c10::AliasInfo* alias = argument.alias_info()) {
      writes = writes || alias->isWrite();
    }
  }
  return (view && !writes) || op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

}  // namespace

void register_fault_path() {
  static std::mutex mutex;
  // Leaked on purpose: unregistering at exit would race with the destruction of the dispatcher.
  static std::vector<c10::RegistrationHandleRAII>* registrations = nullptr;
  const std::lock_guard lock(mutex);
  if (registrations != nullptr) {
    return;
  }
  registrations = std::make_unique<std::vector<c10::RegistrationHandleRAII>>().release();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(kFaultKey) || detaches_storage(name) || !falls_through(*op)) {
      continue;
    }
    registrations->push_back(dispatcher.registerImpl(name, kFaultKey, c10::KernelFunction::makeFallthrough(),
                                                     std::nullopt, nullptr, "hydra_ext fall-through"));
  }
}

TORCH_LIBRARY_IMPL(_, HYDRA_FAULT_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fault_fallback>());
}

}  // namespace hydra
