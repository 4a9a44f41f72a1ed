// One exchange of a communicator: moves the bytes of all its messages at the same time.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "emulator/nccl/communicator.h"

namespace emulated_cuda::nccl {

/// Lives for one exchange. Not thread-safe.
class Exchange {
 public:
  /// By rank: the connections to send on, and to receive on.
  Exchange(int rank, const std::vector<Descriptor>& to, const std::vector<Descriptor>& from);

  void add(const Outgoing& message);
  void add(const Incoming& message);
  /// Throws Aborted if `wake` is raised, and Failed.
  void run(const WakeFlag& wake, Clock::time_point deadline);

 private:
  struct Sending {
    std::vector<Outgoing> messages;
    std::size_t current = 0;   // the message that is being written
    std::size_t written = 0;   // bytes of it, with the header
    std::size_t answered = 0;  // messages that were received
    bool gone = false;         // the other process has ended
    bool looked = false;       // what the other rank does instead of receiving was looked at

    bool done() const noexcept { return answered == messages.size(); }
    bool has_to_write() const noexcept { return current < messages.size(); }
  };
  struct Receiving {
    std::vector<Incoming> messages;
    std::size_t current = 0;
    std::size_t read = 0;  // bytes of the current message, with the header
    Header header;
    bool gone = false;

    bool done() const noexcept { return current == messages.size(); }
  };

  bool done() const noexcept;
  void wait(const WakeFlag& wake, Clock::time_point deadline);
  void write(int peer, Sending& sending);
  void read_answers(int peer, Sending& sending);
  void read(int peer, Receiving& receiving);
  void check_header(int peer, const Receiving& receiving);
  void answer(int peer) const;
  /// Finds a rank that waits for this one while this one waits for it.
  void look_for_deadlock(int peer, Sending& sending);
  [[noreturn]] void mismatch(int peer, const Header& own, const Header& found, const char* what) const;
  std::string waited_for() const;

  /// The connection to a rank, and the one from it.
  const Descriptor& to(int peer) const { return to_[static_cast<std::size_t>(peer)]; }
  const Descriptor& from(int peer) const { return from_[static_cast<std::size_t>(peer)]; }

  const int rank_;
  const std::vector<Descriptor>& to_;
  const std::vector<Descriptor>& from_;
  std::map<int, Sending> sending_;
  std::map<int, Receiving> receiving_;
};

}  // namespace emulated_cuda::nccl
