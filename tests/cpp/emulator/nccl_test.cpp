// The communicators of the emulated NCCL: what fits is exchanged, and what does not is an error of both sides.
#include "emulator/nccl/communicator.h"

#include <gtest/gtest.h>

#include <array>
#include <condition_variable>
#include <exception>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emulated_cuda::nccl {

namespace {

constexpr auto kNever = Clock::time_point::max();

/// Two communicators of this process, connected.
class Pair {
 public:
  Pair() {
    std::future<void> second = std::async(std::launch::async, [this] { ends_[1]->connect(meeting()); });
    ends_[0]->connect(meeting());
    second.get();
  }

  Communicator& operator[](std::size_t rank) { return *ends_[rank]; }

 private:
  Meeting meeting() {
    const auto tell = [this](const std::string& key, const std::string& value) {
      const std::lock_guard lock(mutex_);
      names_[key] = value;
      changed_.notify_all();
    };
    const auto hear = [this](const std::string& key, const std::function<bool()>& /*given_up*/) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return names_.contains(key); });
      return names_[key];
    };
    return {.tell = tell, .hear = hear};
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> names_;
  std::array<std::unique_ptr<Communicator>, 2> ends_{std::make_unique<Communicator>(0, 2),
                                                     std::make_unique<Communicator>(1, 2)};
};

Header header_of(Kind kind, const std::vector<char>& data, int peer, bool alone = false) {
  Header header;
  header.kind = kind;
  header.count = header.bytes = data.size();
  header.root = peer;
  header.alone = alone;
  header.type = {'B', 'y', 't', 'e'};
  return header;
}

Outgoing sent(const std::vector<char>& data, int peer, bool alone = false) {
  return {.peer = peer, .header = header_of(Kind::kSend, data, peer, alone), .data = data.data()};
}

Incoming received(std::vector<char>& data, int peer) {
  return {.peer = peer, .expected = header_of(Kind::kReceive, data, peer), .data = data.data()};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// The errors of what the two ranks do at the same time.
std::array<std::string, 2> errors_of(const std::function<void()>& first, const std::function<void()>& second) {
  std::future<std::string> other = std::async(std::launch::async, [&] { return error_of(second); });
  std::string own = error_of(first);
  return {own, other.get()};
}

}  // namespace

TEST(Communicators, LargeMessagesCrossInBothDirectionsAtOnce) {
  Pair ranks;
  const std::vector<char> ones(10'000'000, 1);
  const std::vector<char> twos(10'000'000, 2);
  std::vector<char> first(ones.size());
  std::vector<char> second(ones.size());
  const auto errors = errors_of([&] { ranks[0].exchange({sent(ones, 1)}, {received(first, 1)}, kNever); },
                                [&] { ranks[1].exchange({sent(twos, 0)}, {received(second, 0)}, kNever); });
  EXPECT_EQ(errors[0] + errors[1], "");
  EXPECT_EQ(first, twos);
  EXPECT_EQ(second, ones);
}

TEST(Communicators, MessagesKeepTheirOrder) {
  Pair ranks;
  const std::vector<char> one(1, 1);
  const std::vector<char> two(2, 2);
  std::vector<char> first(1);
  std::vector<char> second(2);
  const auto errors = errors_of([&] { ranks[0].exchange({sent(one, 1), sent(two, 1)}, {}, kNever); },
                                [&] {
                                  ranks[1].exchange({}, {received(first, 0)}, kNever);
                                  ranks[1].exchange({}, {received(second, 0)}, kNever);
                                });
  EXPECT_EQ(errors[0] + errors[1], "");
  EXPECT_EQ(first, one);
  EXPECT_EQ(second, two);
}

TEST(Communicators, OtherSizesAreAnErrorOfBothThatStays) {
  Pair ranks;
  const std::vector<char> three(3);
  std::vector<char> four(4);
  const auto errors = errors_of([&] { ranks[0].exchange({sent(three, 1)}, {}, kNever); },
                                [&] { ranks[1].exchange({}, {received(four, 0)}, kNever); });
  for (const std::string& error : errors) {
    EXPECT_PRED2(contains, error, "send of 3 Byte to rank 1");
    EXPECT_PRED2(contains, error, "recv of 4 Byte from rank 0");
  }
  EXPECT_EQ(error_of([&] { ranks[1].exchange({}, {received(four, 0)}, kNever); }), errors[1]);
}

TEST(Communicators, TwoSendsThatWaitForEachOtherAreFound) {
  Pair ranks;
  const std::vector<char> data(3);
  const auto errors = errors_of([&] { ranks[0].exchange({sent(data, 1, true)}, {}, kNever); },
                                [&] { ranks[1].exchange({sent(data, 0, true)}, {}, kNever); });
  for (const std::string& error : errors) {
    EXPECT_PRED2(contains, error, "two ranks wait for each other");
  }
}

TEST(Communicators, AbortEndsAnExchangeAndAllLaterOnes) {
  Pair ranks;
  std::vector<char> data(3);
  const auto errors = errors_of([&] { ranks[0].exchange({}, {received(data, 1)}, kNever); }, [&] { ranks[0].abort(); });
  EXPECT_PRED2(contains, errors[0], "aborted");
  EXPECT_THROW(ranks[0].exchange({}, {received(data, 1)}, kNever), Aborted);
}

TEST(Communicators, TheDeadlineNamesWhatWasWaitedFor) {
  Pair ranks;
  std::vector<char> data(3);
  EXPECT_PRED2(contains, error_of([&] { ranks[0].exchange({}, {received(data, 1)}, Clock::now()); }),
               "recv of 3 Byte from rank 1 (operation 0) has got nothing from rank 1");
}

}  // namespace emulated_cuda::nccl
