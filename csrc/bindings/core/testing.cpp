#include "csrc/testing/fault_script.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>

#include "csrc/bindings/bindings.h"
#include "csrc/pytorch/memory/account.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/paged_model.h"
#include "csrc/testing/file_faults.h"
#include "csrc/testing/traffic_twin.h"

namespace py = pybind11;

namespace hydra {

namespace {

/// Charges the calling thread's allocations between begin() and end(), to measure the peak of a plain step.
class Meter {
 public:
  explicit Meter(Bytes limit) : account_(std::make_shared<Account>(limit)) {}
  void begin() { before_ = exchange_thread_charge({.account = account_}); }
  void end() { exchange_thread_charge(std::exchange(before_, {})); }
  Ledger& ledger() { return account_->ledger(); }

 private:
  AccountPtr account_;
  ThreadCharge before_;
};

/// Does nothing for CUDA's guards, streams and events. Stands in for them in a torch without CUDA, for tensors without
/// bytes.
void pretend_cuda() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) {
      using Nothing = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
      // Leaked on purpose: torch keeps the pointer.
      const c10::impl::DeviceGuardImplRegistrar registrar(c10::kCUDA, std::make_unique<Nothing>().release());
    }
  });
}

/// Takes arrays of one length, in the order of Traffic's members.
void run_twin(const std::vector<at::Tensor>& update, const std::vector<at::Tensor>& read,
              const std::vector<at::Tensor>& write, ThreadPool& pool) {
  testing::Traffic traffic;
  std::vector<void*> arrays;
  const auto take = [&](const std::vector<at::Tensor>& tensors, std::int64_t bytes, int& count) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.element_size() == bytes) {
        arrays.push_back(tensor.data_ptr());
        ++count;
      }
    }
  };
  take(update, 4, traffic.update4);
  take(update, 2, traffic.update2);
  take(read, 4, traffic.read4);
  take(read, 2, traffic.read2);
  take(write, 2, traffic.write2);
  const py::gil_scoped_release released;
  testing::run_traffic_twin(traffic, arrays, update.at(0).numel(), pool);
}

void drain(PagedModel& model) {
  model.update().finish();
  model.memory().backend().to_device().drain();
  model.memory().backend().to_host().drain();
  if (DiskHomes* const disk = model.homes().disk().homes()) {
    disk->lane().drain();
  }
}

}  // namespace

void bind_testing(py::module_& module) {
  using testing::FaultScript;
  using testing::Operation;
  auto tests = module.def_submodule("testing", "Tools for tests: scripted faults, meters.");
  py::enum_<Operation>(tests, "Operation")
      .value("TO_DEVICE", Operation::kToDevice)
      .value("TO_HOST", Operation::kToHost)
      .value("SLOT", Operation::kSlot);
  py::class_<FaultScript, FaultInjector, std::shared_ptr<FaultScript>>(tests, "FaultScript")
      .def(py::init<>())
      .def("fail", &FaultScript::fail, py::arg("operation"), py::arg("nth"), py::arg("persistent") = false)
      .def("jitter", &FaultScript::jitter, py::arg("operation"), py::arg("seconds"), py::arg("seed"))
      .def("reset", &FaultScript::reset)
      .def("count", &FaultScript::count, py::arg("operation"))
      .def("met", &FaultScript::met);
  using testing::FaultyFiles;
  using testing::FileFault;
  using testing::FileOperation;
  py::enum_<FileOperation>(tests, "FileOperation")
      .value("OPEN", FileOperation::kOpen)
      .value("ALLOCATE", FileOperation::kAllocate)
      .value("READ", FileOperation::kRead)
      .value("WRITE", FileOperation::kWrite);
  py::enum_<FileFault>(tests, "FileFault")
      .value("ERROR", FileFault::kError)
      .value("SHORT", FileFault::kShort)
      .value("DROPPED", FileFault::kDropped)
      .value("FLIPPED", FileFault::kFlipped);
  py::class_<FaultyFiles, FileOperations, std::shared_ptr<FaultyFiles>>(tests, "FaultyFiles")
      .def(py::init<>())
      .def("fail", &FaultyFiles::fail, py::arg("operation"), py::arg("fault"), py::arg("nth"),
           py::arg("persistent") = false, py::arg("error") = 0)
      .def("reset", &FaultyFiles::reset)
      .def("count", &FaultyFiles::count, py::arg("operation"))
      .def("met", &FaultyFiles::met)
      .def("hints", &FaultyFiles::hints);
  tests.def("pretend_cuda", &pretend_cuda, "Lets torch infer devices of fake CUDA tensors in a build without CUDA.");
  tests.def("run_traffic_twin", &run_twin, py::kw_only(), py::arg("update"), py::arg("read"), py::arg("write"),
            py::arg("pool"), "Makes the memory traffic of an update without its arithmetic. Overwrites the tensors.");
  tests.def("drain", &drain, py::arg("model"), py::call_guard<py::gil_scoped_release>(),
            "Waits for the model's update, whose error it raises, and for all transfers, failed ones included.");
  py::class_<Meter>(tests, "Meter")
      .def(py::init<Bytes>(), py::arg("limit") = Ledger::kUnlimited)
      .def("begin", &Meter::begin)
      .def("end", &Meter::end)
      .def_property_readonly("ledger", &Meter::ledger, py::return_value_policy::reference_internal);
}

}  // namespace hydra
