#include "emulator/nccl/exchange.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <string>

namespace emulated_cuda::nccl {

namespace {

constexpr char kReceived = 'r';
constexpr char kRefused = 'x';  // the length and the text of the reason follow

enum class Moved { kSome, kNothing, kEnded };

/// Adds the moved bytes to `done`.
Moved moved(ssize_t result, std::size_t& done) {
  if (result > 0) {
    done += static_cast<std::size_t>(result);
    return Moved::kSome;
  }
  return result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? Moved::kNothing : Moved::kEnded;
}

int milliseconds_until(Clock::time_point deadline) {
  if (deadline == Clock::time_point::max()) {
    return -1;
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, INT_MAX));
}

}  // namespace

Exchange::Exchange(int rank, const std::vector<Descriptor>& to, const std::vector<Descriptor>& from)
    : rank_(rank), to_(to), from_(from) {}

void Exchange::add(const Outgoing& message) { sending_[message.peer].messages.push_back(message); }

void Exchange::add(const Incoming& message) { receiving_[message.peer].messages.push_back(message); }

bool Exchange::done() const noexcept {
  return std::ranges::all_of(sending_, [](const auto& each) { return each.second.done(); }) &&
         std::ranges::all_of(receiving_, [](const auto& each) { return each.second.done(); });
}

void Exchange::run(const WakeFlag& wake, Clock::time_point deadline) {
  for (auto& [peer, sending] : sending_) {
    write(peer, sending);
  }
  while (!done()) {
    wait(wake, deadline);
  }
}

void Exchange::wait(const WakeFlag& wake, Clock::time_point deadline) {
  std::vector<pollfd> waiting{{.fd = wake.descriptor(), .events = POLLIN, .revents = 0}};
  std::vector<std::function<void()>> actions{[] { throw Aborted("the communicator was aborted"); }};
  for (auto& [peer, sending] : sending_) {
    if (sending.done() || sending.gone) {
      continue;
    }
    const short events = static_cast<short>(sending.has_to_write() ? POLLIN | POLLOUT : POLLIN);
    waiting.push_back({.fd = to(peer).get(), .events = events, .revents = 0});
    actions.emplace_back([this, peer = peer, &sending = sending] {
      write(peer, sending);
      read_answers(peer, sending);
    });
    const auto receiving = receiving_.find(peer);
    if (!sending.looked && (receiving == receiving_.end() || receiving->second.done())) {
      waiting.push_back({.fd = from(peer).get(), .events = POLLIN, .revents = 0});
      actions.emplace_back([this, peer = peer, &sending = sending] { look_for_deadlock(peer, sending); });
    }
  }
  for (auto& [peer, receiving] : receiving_) {
    if (!receiving.done() && !receiving.gone) {
      waiting.push_back({.fd = from(peer).get(), .events = POLLIN, .revents = 0});
      actions.emplace_back([this, peer = peer, &receiving = receiving] { read(peer, receiving); });
    }
  }
  const int ready = ::poll(waiting.data(), waiting.size(), milliseconds_until(deadline));
  if (ready == 0 && Clock::now() >= deadline) {
    throw Failed("rank " + std::to_string(rank_) + " has waited too long: " + waited_for());
  }
  for (std::size_t index = 0; ready > 0 && index < waiting.size(); ++index) {
    if (waiting[index].revents != 0) {
      actions[index]();
    }
  }
}

void Exchange::write(int peer, Sending& sending) {
  while (!sending.gone && sending.has_to_write()) {
    const Outgoing& message = sending.messages[sending.current];
    const std::size_t size = sizeof(Header);
    const char* from = sending.written < size ? reinterpret_cast<const char*>(&message.header) + sending.written
                                              : static_cast<const char*>(message.data) + (sending.written - size);
    const std::size_t left = (sending.written < size ? size : size + message.header.bytes) - sending.written;
    if (left > 0) {
      const Moved how = moved(::send(to(peer).get(), from, left, MSG_NOSIGNAL), sending.written);
      if (how == Moved::kEnded) {
        read_answers(peer, sending);  // it may have refused the message before it ended
        sending.gone = true;
      }
      if (how != Moved::kSome) {
        return;
      }
    }
    if (sending.written == size + message.header.bytes) {
      ++sending.current;
      sending.written = 0;
    }
  }
}

void Exchange::read_answers(int peer, Sending& sending) {
  char word = 0;
  std::size_t count = 0;
  while (!sending.gone && !sending.done()) {
    const Moved how = moved(::recv(to(peer).get(), &word, 1, MSG_DONTWAIT), count);
    if (how != Moved::kSome) {
      sending.gone = how == Moved::kEnded;
      return;
    }
    if (word == kRefused) {
      std::uint32_t length = 0;
      read_all(to(peer), &length, sizeof(length));
      std::string text(length, '\0');
      read_all(to(peer), text.data(), length);
      throw Failed(text);
    }
    ++sending.answered;
  }
}

void Exchange::read(int peer, Receiving& receiving) {
  while (!receiving.done()) {
    const Incoming& message = receiving.messages[receiving.current];
    const std::size_t size = sizeof(Header);
    char* into = receiving.read < size ? reinterpret_cast<char*>(&receiving.header) + receiving.read
                                       : static_cast<char*>(message.data) + (receiving.read - size);
    const std::size_t left = (receiving.read < size ? size : size + message.expected.bytes) - receiving.read;
    if (left > 0) {
      const Moved how = moved(::recv(from(peer).get(), into, left, MSG_DONTWAIT), receiving.read);
      receiving.gone = how == Moved::kEnded;
      if (how != Moved::kSome) {
        return;
      }
      if (receiving.read == size) {
        check_header(peer, receiving);
      }
    }
    if (receiving.read == size + message.expected.bytes) {
      answer(peer);
      ++receiving.current;
      receiving.read = 0;
    }
  }
}

void Exchange::check_header(int peer, const Receiving& receiving) {
  const Header& expected = receiving.messages[receiving.current].expected;
  if (!fits(expected, receiving.header) || expected.bytes != receiving.header.bytes) {
    mismatch(peer, expected, receiving.header, "the ranks' operations do not fit");
  }
}

void Exchange::answer(int peer) const {
  // A rank that has ended needs no answer.
  [[maybe_unused]] const ssize_t sent = ::send(from(peer).get(), &kReceived, 1, MSG_NOSIGNAL);
}

void Exchange::look_for_deadlock(int peer, Sending& sending) {
  Header header;
  const ssize_t found = ::recv(from(peer).get(), &header, sizeof(header), MSG_PEEK | MSG_DONTWAIT);
  if (found != static_cast<ssize_t>(sizeof(header))) {
    sending.looked = found == 0;  // the other process has ended
    return;
  }
  read_answers(peer, sending);  // the answer, if there is one, came before that header
  sending.looked = true;
  if (!sending.done() && !sending.gone && (header.alone || header.collective())) {
    mismatch(peer, sending.messages[sending.answered].header, header, "two ranks wait for each other");
  }
}

void Exchange::mismatch(int peer, const Header& own, const Header& found, const char* what) const {
  const std::string text = std::string(what) + ": rank " + std::to_string(rank_) + " is in " + describe(own) +
                           ", and rank " + std::to_string(peer) + " is in " + describe(found) +
                           ". With NCCL this hangs, or corrupts memory";
  const auto length = static_cast<std::uint32_t>(text.size());
  std::string answer(1, kRefused);
  answer.append(reinterpret_cast<const char*>(&length), sizeof(length));
  answer += text;
  [[maybe_unused]] const ssize_t sent = ::send(from(peer).get(), answer.data(), answer.size(), MSG_NOSIGNAL);
  throw Failed(text);
}

std::string Exchange::waited_for() const {
  for (const auto& [peer, receiving] : receiving_) {
    if (!receiving.done()) {
      return describe(receiving.messages[receiving.current].expected) + " has got nothing from rank " +
             std::to_string(peer);
    }
  }
  for (const auto& [peer, sending] : sending_) {
    if (!sending.done()) {
      return describe(sending.messages[sending.answered].header) + ", which rank " + std::to_string(peer) +
             " does not receive";
    }
  }
  return "nothing";
}

}  // namespace emulated_cuda::nccl
