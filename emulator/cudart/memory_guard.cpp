#include "emulator/cudart/memory_guard.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>

#include "emulator/cudart/control.h"

namespace emulated_cuda::cudart {

namespace {

constexpr std::size_t kAlignment = std::size_t{2} << 20;

std::array<std::atomic<std::uintptr_t>, kMostDevices> g_devices{};
struct sigaction g_earlier{};

/// A lock that a signal handler can try to take.
class HandlerLock {
 public:
  void lock() noexcept {
    while (!try_lock()) {
      busy_.wait(true, std::memory_order_relaxed);
    }
  }
  bool try_lock() noexcept { return !busy_.test_and_set(std::memory_order_acquire); }
  void unlock() noexcept {
    busy_.clear(std::memory_order_release);
    busy_.notify_one();
  }

 private:
  std::atomic_flag busy_;
};

struct Name {
  std::uintptr_t begin = 0;  // of all bytes that were named, of which some may have been cut off
  std::uintptr_t end = 0;
  std::shared_ptr<const std::string> text;
};

struct Names {
  HandlerLock lock;
  std::map<std::uintptr_t, Name> ranges;  // by their first byte; disjoint
};

Names& names() {
  static Names& instance = *std::make_unique<Names>().release();  // outlives all threads
  return instance;
}

/// One line, made and written without allocation.
class Line {
 public:
  Line& text(std::string_view part) noexcept {
    const std::size_t taken = std::min(part.size(), bytes_.size() - used_);
    std::copy_n(part.begin(), taken, bytes_.begin() + static_cast<std::ptrdiff_t>(used_));
    used_ += taken;
    return *this;
  }
  Line& number(std::uintptr_t value, int base) noexcept {
    std::array<char, 24> digits{};
    const auto end = std::to_chars(digits.begin(), digits.end(), value, base);
    return text({digits.data(), static_cast<std::size_t>(end.ptr - digits.data())});
  }
  void write() const noexcept { static_cast<void>(!::write(STDERR_FILENO, bytes_.data(), used_)); }

 private:
  std::array<char, 512> bytes_{};
  std::size_t used_ = 0;
};

void describe_name(Line& line, std::uintptr_t address) noexcept {
  Names& known = names();
  // The thread may have been stopped inside name_bytes().
  bool locked = known.lock.try_lock();
  for (int attempt = 0; !locked && attempt < 100; ++attempt) {
    ::poll(nullptr, 0, 1);
    locked = known.lock.try_lock();
  }
  if (!locked) {
    line.text(", whose name is being changed");
    return;
  }
  const auto next = known.ranges.upper_bound(address);
  if (next != known.ranges.begin() && std::prev(next)->second.end > address) {
    const Name& name = std::prev(next)->second;
    line.text(", byte ").number(address - name.begin, 10).text(" of '").text(*name.text).text("'");
  } else {
    line.text(", which has no name");
  }
  known.lock.unlock();
}

void pass_on(int signal, siginfo_t* info, void* context) {
  if ((static_cast<unsigned>(g_earlier.sa_flags) & static_cast<unsigned>(SA_SIGINFO)) != 0) {
    g_earlier.sa_sigaction(signal, info, context);
  } else if (g_earlier.sa_handler != SIG_DFL && g_earlier.sa_handler != SIG_IGN) {
    g_earlier.sa_handler(signal);
  } else {
    ::sigaction(SIGSEGV, &g_earlier, nullptr);
    if (info->si_code <= 0) {  // sent by a process: no instruction is repeated, which would raise it again
      ::raise(signal);
    }
  }
}

void on_segmentation_fault(int signal, siginfo_t* info, void* context) {
  const auto address = address_of(info->si_addr);
  const int device = info->si_code > 0 ? device_at(address) : -1;
  if (device < 0) {
    pass_on(signal, info, context);
    return;
  }
  Line line;
  line.text("emulated CUDA: ");
  line.text(info->si_code == SEGV_PKUERR ? "a host thread touched device memory: " : "no memory is mapped here: ");
  line.text("cuda:").number(static_cast<std::uintptr_t>(device), 10).text(" at offset 0x");
  line.number(address - g_devices.at(static_cast<std::size_t>(device)), 16);
  describe_name(line, address);
  line.text("\n").write();
  // The access is repeated now, and ends the process as it would have without this handler.
  ::sigaction(SIGSEGV, &g_earlier, nullptr);
}

void install_handler() {
  static std::once_flag installed;
  std::call_once(installed, [] {
    names();
    struct sigaction action{};
    action.sa_sigaction = &on_segmentation_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(SIGSEGV, &action, &g_earlier);
  });
}

/// Cuts [begin, end) out of all ranges. The caller holds the lock.
void cut(std::map<std::uintptr_t, Name>& ranges, std::uintptr_t begin, std::uintptr_t end) {
  auto at = ranges.upper_bound(begin);
  if (at != ranges.begin()) {
    --at;
  }
  while (at != ranges.end() && at->first < end) {
    const std::uintptr_t first = at->first;
    if (at->second.end <= begin) {
      ++at;
      continue;
    }
    if (at->second.end > end) {
      ranges.emplace(end, at->second);
    }
    if (first < begin) {
      at->second.end = begin;
      ++at;
    } else {
      at = ranges.erase(at);
    }
  }
}

}  // namespace

int protection_key() noexcept {
  static const int key = ::pkey_alloc(0, PKEY_DISABLE_ACCESS);
  return key;
}

bool hold_key(bool hold) noexcept {
  const int key = protection_key();
  if (key < 0) {
    return true;
  }
  const bool held = ::pkey_get(key) == 0;
  if (held != hold) {
    ::pkey_set(key, hold ? 0 : PKEY_DISABLE_ACCESS);
  }
  return held;
}

std::uintptr_t reserve_device(int device) {
  install_handler();
  const std::size_t bytes = kDeviceAddresses + kAlignment;
  void* const place = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) {
    throw std::bad_alloc();
  }
  ::madvise(place, bytes, MADV_DONTFORK);
  const std::uintptr_t begin = (address_of(place) + kAlignment - 1) / kAlignment * kAlignment;
  g_devices.at(static_cast<std::size_t>(device)) = begin;
  return begin;
}

int device_at(std::uintptr_t address) noexcept {
  for (std::size_t device = 0; device < g_devices.size(); ++device) {
    const std::uintptr_t begin = g_devices[device].load(std::memory_order_relaxed);
    if (begin != 0 && address >= begin && address - begin < kDeviceAddresses) {
      return static_cast<int>(device);
    }
  }
  return -1;
}

void name_bytes(std::uintptr_t begin, std::size_t bytes, const std::string& name) {
  if (bytes == 0) {
    return;
  }
  const auto text = std::make_shared<const std::string>(name);
  Names& known = names();
  const std::lock_guard lock(known.lock);
  cut(known.ranges, begin, begin + bytes);
  if (!name.empty()) {
    known.ranges.insert_or_assign(begin, Name{.begin = begin, .end = begin + bytes, .text = text});
  }
}

}  // namespace emulated_cuda::cudart

namespace emulated_cuda {

using namespace cudart;

bool memory_is_guarded() noexcept { return protection_key() >= 0; }

DeviceAccess::DeviceAccess() noexcept : taken_(!hold_key(true)) {}

DeviceAccess::~DeviceAccess() {
  if (taken_) {
    hold_key(false);
  }
}

int device_of(const void* pointer) noexcept { return device_at(address_of(pointer)); }

void name_memory(const void* pointer, std::size_t bytes, const std::string& name) {
  name_bytes(address_of(pointer), bytes, name);
}

}  // namespace emulated_cuda
