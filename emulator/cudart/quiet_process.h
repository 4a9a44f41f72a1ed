// Whether all other threads of this process wait for something, as Linux tells in /proc.
//
// Two looks at each thread's state and at the number of times it ran: if all sleep in both, and none ran in between,
// none could have woken another one. A thread that is ready to run, but has no core, does not sleep. Not thread-safe.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <vector>

namespace emulated_cuda::cudart {

class QuietProcess {
 public:
  QuietProcess() = default;
  ~QuietProcess();
  QuietProcess(const QuietProcess&) = delete;
  QuietProcess& operator=(const QuietProcess&) = delete;

  /// Whether all threads but the calling one sleep.
  bool quiet();

 private:
  /// What shows a thread's state, and how often it ran.
  struct Files {
    int state = -1;
    int runs = -1;
  };
  /// One look: false if a thread runs.
  bool look(std::vector<std::uint64_t>& runs);
  void find_threads();

  std::map<pid_t, Files> threads_;
  std::vector<std::uint64_t> first_;
  std::vector<std::uint64_t> second_;
};

}  // namespace emulated_cuda::cudart
