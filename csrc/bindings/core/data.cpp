#include <pybind11/typing.h>

#include "csrc/bindings/bindings.h"
#include "csrc/data/shared_region.h"

namespace py = pybind11;

namespace hydra {
namespace {

/// A block of a region as Python sees it: memory that lives as long as something refers to it.
class SharedBlock {
 public:
  SharedBlock(std::shared_ptr<SharedRegion> region, Bytes begin, Bytes size)
      : region_(std::move(region)), begin_(begin), size_(size) {}
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;
  ~SharedBlock() { region_->release(begin_); }

  Bytes begin() const noexcept { return begin_; }
  py::buffer_info buffer() const {
    return py::buffer_info(reinterpret_cast<std::uint8_t*>(region_->data() + begin_), size_);
  }

 private:
  std::shared_ptr<SharedRegion> region_;
  Bytes begin_;
  Bytes size_;
};

py::typing::Optional<SharedBlock> allocate(const std::shared_ptr<SharedRegion>& region, Bytes bytes) {
  std::optional<Bytes> begin;
  {
    const py::gil_scoped_release release;
    begin = region->allocate(bytes);
  }
  return begin ? py::cast(std::make_unique<SharedBlock>(region, *begin, bytes)) : py::none();
}

}  // namespace

void bind_data(py::module_& module) {
  py::class_<SharedBlock>(module, "SharedBlock", py::buffer_protocol(), "A block of a shared region, as a buffer.")
      .def_property_readonly("begin", &SharedBlock::begin, "Where it starts in the region.")
      .def_buffer(&SharedBlock::buffer);
  py::class_<SharedRegion, std::shared_ptr<SharedRegion>>(module, "SharedRegion",
                                                          "Memory that this process shares with its workers.")
      .def(py::init<Bytes>(), py::arg("most"))
      .def("allocate", &allocate, py::arg("bytes"), "A block; None if there is no room below the limit.")
      .def("trim", &SharedRegion::trim, py::call_guard<py::gil_scoped_release>())
      .def_property("limit", released(&SharedRegion::limit), &SharedRegion::set_limit)
      .def_property_readonly("used", released(&SharedRegion::used))
      .def_property_readonly("allocated", released(&SharedRegion::allocated))
      .def_property_readonly("most", &SharedRegion::most)
      .def_property_readonly("descriptor", &SharedRegion::descriptor)
      .def_property_readonly(
          "address", [](const SharedRegion& region) { return reinterpret_cast<std::uintptr_t>(region.data()); });
}

}  // namespace hydra
