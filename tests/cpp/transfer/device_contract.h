// The fixture of the contract suite for every DeviceBackend. The tests are in device_backend_test.cpp. A backend joins
// with an INSTANTIATE_TEST_SUITE_P in its own file.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "csrc/transfer/device_backend.h"
#include "tests/cpp/support.h"

namespace hydra::test {

struct BackendCase {
  std::string name;
  std::function<std::unique_ptr<DeviceBackend>()> make;
};

inline std::ostream& operator<<(std::ostream& out, const BackendCase& backend) { return out << backend.name; }

class DeviceContract : public ::testing::TestWithParam<BackendCase> {
 protected:
  /// A slot that is released at the end of the test. It is device memory, which only lanes may touch.
  class Slot {
   public:
    Slot(DeviceBackend& device, Bytes bytes)
        : device_(device), bytes_(bytes), pointer_(device.slots().allocate(bytes)) {}
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;
    ~Slot() { device_.slots().release(pointer_, bytes_); }
    char* get() const { return static_cast<char*>(pointer_); }

   private:
    DeviceBackend& device_;
    Bytes bytes_;
    void* pointer_;
  };

  Job upload(const Slot& slot, const std::vector<std::uint8_t>& bytes) {
    Job job = copy_job(slot.get(), bytes);
    job.fences.push_back(device().record());
    return job;
  }

  std::vector<std::uint8_t> download(const void* pointer, Bytes bytes) {
    std::vector<std::uint8_t> host(static_cast<std::size_t>(bytes));
    Job job;
    job.segments.push_back({.destination = host.data(), .source = pointer, .bytes = bytes});
    job.fences.push_back(device().record());
    device().to_host().submit(std::move(job))->wait();
    return host;
  }

  DeviceBackend& device() { return *device_; }

 private:
  std::unique_ptr<DeviceBackend> device_ = GetParam().make();
};

}  // namespace hydra::test
