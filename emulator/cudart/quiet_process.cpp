#include "emulator/cudart/quiet_process.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <string_view>

namespace emulated_cuda::cudart {

namespace {

using Text = std::array<char, 512>;

/// Empty if the thread has ended.
std::string_view read_from_start(int file, Text& text) {
  const ssize_t count = ::pread(file, text.data(), text.size(), 0);
  return {text.data(), count > 0 ? static_cast<std::size_t>(count) : 0};
}

/// The letter behind the name, which stands in parentheses and may contain any.
char state_in(std::string_view stat) {
  const std::size_t end = stat.rfind(')');
  return end == std::string_view::npos || end + 2 >= stat.size() ? '?' : stat[end + 2];
}

std::uint64_t last_number(std::string_view text) {
  const std::size_t space = text.rfind(' ');
  return space == std::string_view::npos ? 0 : std::strtoull(text.data() + space, nullptr, 10);
}

int open_of(pid_t thread, const char* name) {
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/" + name;
  return ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
}

void close_file(int file) {
  if (file >= 0) {
    ::close(file);
  }
}

}  // namespace

QuietProcess::~QuietProcess() {
  for (const auto& [thread, files] : threads_) {
    close_file(files.state);
    close_file(files.runs);
  }
}

bool QuietProcess::quiet() {
  find_threads();
  return look(first_) && look(second_) && first_ == second_;
}

bool QuietProcess::look(std::vector<std::uint64_t>& runs) {
  runs.clear();
  for (const auto& [thread, files] : threads_) {
    Text text{};
    const char state = state_in(read_from_start(files.state, text));
    if (state != 'S' && state != '?') {
      return false;
    }
    runs.push_back(last_number(read_from_start(files.runs, text)));
  }
  return true;
}

void QuietProcess::find_threads() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/task"), &::closedir);
  if (!folder) {
    return;
  }
  std::set<pid_t> present;
  while (const dirent* const entry = ::readdir(folder.get())) {
    const auto thread = static_cast<pid_t>(std::strtol(entry->d_name, nullptr, 10));
    if (thread <= 0 || thread == ::gettid()) {
      continue;
    }
    present.insert(thread);
    if (!threads_.contains(thread)) {
      threads_[thread] = {.state = open_of(thread, "stat"), .runs = open_of(thread, "schedstat")};
    }
  }
  std::erase_if(threads_, [&](const auto& known) {
    if (present.contains(known.first)) {
      return false;
    }
    close_file(known.second.state);
    close_file(known.second.runs);
    return true;
  });
}

}  // namespace emulated_cuda::cudart
