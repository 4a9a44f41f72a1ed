// The queue, with a lane that moves no bytes: it calls a hook at each step, on the lane's own thread.
#include "csrc/transfer/worker_lane.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "csrc/base/errors.h"
#include "tests/cpp/support.h"

namespace hydra {
namespace {

using test::Gate;
using test::ManualFence;
using test::message_of;
constexpr Bytes kWorkerPiece = WorkerLane::kPieceBytes;

class ScriptedLane final : public WorkerLane {
 public:
  using Hook = std::function<void(const Segment&)>;

  explicit ScriptedLane(Hook on_move = {}) : on_move_(std::move(on_move)) { start(); }
  ~ScriptedLane() override { stop(); }

 protected:
  void begin(Job& job) override {
    for (const FencePtr& fence : job.fences) {
      if (fence) {
        fence->wait();
      }
    }
  }
  double move(const Segment& piece) override {
    if (on_move_) {
      on_move_(piece);
    }
    return 0.25;
  }

 private:
  const Hook on_move_;
};

/// Never dereferenced: a tag for the hook.
char* tag(std::uintptr_t number) { return reinterpret_cast<char*>(number); }  // NOLINT
constexpr std::uintptr_t kFar = 1ULL << 40;

Job job_of(std::uintptr_t number, Bytes bytes, Priority priority = Priority::kPrefetch) {
  Job job;
  job.segments.push_back({.destination = tag(number * kFar), .source = tag(number * kFar), .bytes = bytes});
  job.priority = priority;
  return job;
}

std::uintptr_t number_of(const Segment& piece) { return reinterpret_cast<std::uintptr_t>(piece.destination) / kFar; }

TEST(WorkerLane, ServesOneClassInOrderOfSubmission) {
  std::vector<std::uintptr_t> order;
  Gate gate;
  ScriptedLane lane([&](const Segment& piece) { order.push_back(number_of(piece)); });
  Job first = job_of(1, 8);
  first.before = [&] { gate.wait(); };
  std::vector<TicketPtr> tickets = {lane.submit(std::move(first))};
  for (std::uintptr_t number = 2; number <= 6; ++number) {
    tickets.push_back(lane.submit(job_of(number, 8)));
  }
  gate.open();
  lane.drain();
  EXPECT_EQ(order, (std::vector<std::uintptr_t>{1, 2, 3, 4, 5, 6}));
  for (const TicketPtr& ticket : tickets) {
    EXPECT_TRUE(ticket->finished());
  }
}

TEST(WorkerLane, ServesTheMostUrgentClassFirst) {
  std::vector<std::uintptr_t> order;
  Gate gate;
  ScriptedLane lane([&](const Segment& piece) { order.push_back(number_of(piece)); });
  Job first = job_of(1, 8, Priority::kFault);
  first.before = [&] { gate.wait(); };
  lane.submit(std::move(first));
  lane.submit(job_of(2, 8, Priority::kPrefetch));
  lane.submit(job_of(3, 8, Priority::kGradient));
  lane.submit(job_of(4, 8, Priority::kFault));
  lane.submit(job_of(5, 8, Priority::kGradient));
  gate.open();
  lane.drain();
  EXPECT_EQ(order, (std::vector<std::uintptr_t>{1, 4, 3, 5, 2}));
}

TEST(WorkerLane, LetsAMoreUrgentJobInBetweenTwoPieces) {
  std::vector<std::uintptr_t> order;
  ScriptedLane* self = nullptr;
  Gate ready;
  ScriptedLane lane([&](const Segment& piece) {
    ready.wait();
    order.push_back(number_of(piece));
    if (order.size() == 1) {
      self->submit(job_of(2, 8, Priority::kFault));
      self->submit(job_of(3, 8, Priority::kPrefetch));
    }
  });
  self = &lane;
  const TicketPtr big = lane.submit(job_of(1, 2 * kWorkerPiece + 1, Priority::kPrefetch));
  ready.open();
  big->wait();
  lane.drain();
  EXPECT_EQ(order, (std::vector<std::uintptr_t>{1, 2, 1, 1, 3}));
}

TEST(WorkerLane, CutsSegmentsIntoPiecesThatCoverEveryByteOnceInOrder) {
  std::vector<Segment> pieces;
  ScriptedLane lane([&](const Segment& piece) { pieces.push_back(piece); });
  Job job;
  job.segments = {{.destination = tag(kFar), .source = tag(2 * kFar), .bytes = 2 * kWorkerPiece + 5},
                  {.destination = nullptr, .source = nullptr, .bytes = 0},
                  {.destination = tag(3 * kFar), .source = tag(4 * kFar), .bytes = 7}};
  lane.submit(std::move(job))->wait();
  ASSERT_EQ(pieces.size(), 4U);
  const std::vector<Bytes> sizes = {kWorkerPiece, kWorkerPiece, 5, 7};
  const std::vector<char*> destinations = {tag(kFar), tag(kFar) + kWorkerPiece, tag(kFar) + 2 * kWorkerPiece,
                                           tag(3 * kFar)};
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_EQ(pieces[i].bytes, sizes[i]);
    EXPECT_EQ(pieces[i].destination, destinations[i]);
  }
  EXPECT_EQ(pieces[2].source, tag(2 * kFar) + 2 * kWorkerPiece);
}

TEST(WorkerLane, RunsBeforeThenTheBytesThenAfter) {
  std::vector<std::string> order;
  ScriptedLane lane([&](const Segment&) { order.emplace_back("move"); });
  Job job = job_of(1, kWorkerPiece + 1);
  job.before = [&] { order.emplace_back("before"); };
  job.after = [&] { order.emplace_back("after"); };
  lane.submit(std::move(job))->wait();
  EXPECT_EQ(order, (std::vector<std::string>{"before", "move", "move", "after"}));
}

TEST(WorkerLane, RunsTheFunctionsOfAJobWithoutBytes) {
  std::vector<std::string> order;
  ScriptedLane lane;
  Job job;
  job.before = [&] { order.emplace_back("before"); };
  job.after = [&] { order.emplace_back("after"); };
  const TicketPtr ticket = lane.submit(std::move(job));
  ticket->wait();
  EXPECT_EQ(ticket->bytes(), 0);
  EXPECT_EQ(order, (std::vector<std::string>{"before", "after"}));
}

TEST(WorkerLane, MovesNoByteBeforeTheFenceIsReached) {
  const auto fence = std::make_shared<ManualFence>();
  std::atomic<bool> early{false};
  Gate arrived;
  ScriptedLane lane([&](const Segment&) { early = early || !fence->reached(); });
  Job job = job_of(1, 8);
  job.fences = {nullptr, fence};
  job.before = [&] { arrived.open(); };
  const TicketPtr ticket = lane.submit(std::move(job));
  arrived.wait();
  EXPECT_FALSE(ticket->finished());
  fence->reach();
  ticket->wait();
  EXPECT_FALSE(early.load());
}

TEST(WorkerLane, AnErrorInBeforeLeavesOutTheBytesAndAfterAndTheLaneGoesOn) {
  std::vector<std::uintptr_t> order;
  std::atomic<bool> after_ran{false};
  ScriptedLane lane([&](const Segment& piece) { order.push_back(number_of(piece)); });
  Job job = job_of(1, 8);
  job.before = [] { throw std::runtime_error("cast failed"); };
  job.after = [&] { after_ran = true; };
  const TicketPtr failed = lane.submit(std::move(job));
  const TicketPtr next = lane.submit(job_of(2, 8));
  EXPECT_EQ(message_of(*failed), "cast failed");
  EXPECT_NO_THROW(next->wait());
  EXPECT_EQ(order, (std::vector<std::uintptr_t>{2}));
  EXPECT_FALSE(after_ran.load());
}

TEST(WorkerLane, SourcesMayBeLocatedBehindBefore) {
  std::vector<const void*> sources;
  std::vector<std::string> order;
  ScriptedLane lane([&](const Segment& piece) { sources.push_back(piece.source); });
  Job job = job_of(1, 8);
  job.segments.front().source = nullptr;
  job.before = [&] { order.emplace_back("before"); };
  job.locate = [&](std::vector<Segment>& segments) {
    order.emplace_back("locate");
    segments.front().source = tag(7);
  };
  lane.submit(std::move(job))->wait();
  EXPECT_EQ(order, (std::vector<std::string>{"before", "locate"}));
  EXPECT_EQ(sources, (std::vector<const void*>{tag(7)}));

  Job lost = job_of(2, 8);
  lost.segments.front().source = nullptr;
  lost.locate = [](std::vector<Segment>&) {};
  EXPECT_NE(message_of(*lane.submit(std::move(lost))).find("lacks its source"), std::string::npos);
  EXPECT_EQ(sources.size(), 1U);
  Job without = job_of(3, 8);
  without.segments.front().source = nullptr;
  EXPECT_THROW(lane.submit(std::move(without)), StateError);
}

TEST(WorkerLane, AnErrorInAPieceLeavesOutTheRestAndTheLaneGoesOn) {
  std::atomic<int> moved{0};
  ScriptedLane lane([&](const Segment& piece) {
    if (number_of(piece) == 1 && ++moved == 2) {
      throw TransferError("copy failed");
    }
  });
  const TicketPtr failed = lane.submit(job_of(1, 4 * kWorkerPiece));
  const TicketPtr next = lane.submit(job_of(2, 8));
  EXPECT_THROW(failed->wait(), TransferError);
  EXPECT_NO_THROW(next->wait());
  EXPECT_EQ(moved.load(), 2);
}

TEST(WorkerLane, AnErrorInAfterFailsTheTicketAndTheLaneGoesOn) {
  ScriptedLane lane;
  Job job = job_of(1, 8);
  job.after = [] { throw std::runtime_error("sum failed"); };
  const TicketPtr failed = lane.submit(std::move(job));
  const TicketPtr next = lane.submit(job_of(2, 8));
  EXPECT_EQ(message_of(*failed), "sum failed");
  EXPECT_NO_THROW(next->wait());
}

TEST(WorkerLane, DestroysWhatAJobOwnsBeforeItsTicketEnds) {
  struct Owned {
    Owned(const TicketPtr& its, bool& first) : ticket(its), came_first(first) {}
    ~Owned() { came_first = !ticket->finished(); }
    const TicketPtr& ticket;
    bool& came_first;
  };
  for (const bool fails : {false, true}) {
    TicketPtr ticket;
    bool came_first = false;
    Gate gate;
    ScriptedLane lane;
    Job job = job_of(1, 8);
    job.before = [&] { gate.wait(); };
    job.after = [fails, owned = std::make_shared<Owned>(ticket, came_first)] {
      if (fails) {
        throw std::runtime_error("on purpose");
      }
    };
    ticket = lane.submit(std::move(job));
    gate.open();
    lane.drain();
    EXPECT_TRUE(came_first);
  }
}

TEST(WorkerLane, CountsWhatItMovedAndHowJobsEnded) {
  ScriptedLane lane([&](const Segment& piece) {
    if (number_of(piece) == 2 && reinterpret_cast<std::uintptr_t>(piece.destination) > 2 * kFar) {
      throw TransferError("second piece");
    }
  });
  const TicketPtr whole = lane.submit(job_of(1, kWorkerPiece + 3));
  const TicketPtr half = lane.submit(job_of(2, 2 * kWorkerPiece));
  half->wait_quietly();
  const LaneStatistics statistics = lane.statistics();
  EXPECT_EQ(statistics.bytes, 2 * kWorkerPiece + 3);
  EXPECT_EQ(statistics.jobs, 2);
  EXPECT_EQ(statistics.failures, 1);
  EXPECT_EQ(statistics.busy_seconds, 0.75);
  EXPECT_EQ(whole->seconds(), 0.5);
  EXPECT_EQ(whole->bytes(), kWorkerPiece + 3);
}

TEST(WorkerLane, DrainWaitsForAllSubmittedBeforeThoughLaterOnesOvertake) {
  ScriptedLane lane;
  std::atomic<bool> stop{false};
  std::jthread others([&] {
    while (!stop) {
      lane.submit(job_of(9, 8, Priority::kFault))->wait();
    }
  });
  for (int i = 0; i < 300; ++i) {
    const TicketPtr slow = lane.submit(job_of(1, 6 * kWorkerPiece, Priority::kPrefetch));
    const TicketPtr quick = lane.submit(job_of(2, 8, Priority::kGradient));
    lane.drain();
    EXPECT_TRUE(slow->finished());
    EXPECT_TRUE(quick->finished());
  }
  stop = true;
}

TEST(WorkerLane, DrainLetsAnotherRunGoOn) {
  Gate gate;
  ScriptedLane lane;
  Job held = job_of(1, 8);
  held.before = [&] { gate.wait(); };
  lane.submit(std::move(held));
  test::expect_pause([&] { lane.drain(); }, [&] { gate.open(); });
}

// ---- several runs, each with a log of its own -------------------------------------------------

Job job_in(ActivityLog& run, std::uintptr_t number, Bytes bytes = 8, Priority priority = Priority::kPrefetch) {
  Job job = job_of(number, bytes, priority);
  job.log = &run;
  return job;
}

TEST(WorkerLane, ServesARunBeforeTheBacklogOfAnotherAndEachInItsOrder) {
  ActivityLog one;
  ActivityLog other;
  std::vector<std::uintptr_t> order;
  Gate gate;
  ScriptedLane lane([&](const Segment& piece) { order.push_back(number_of(piece)); });
  Job first = job_in(one, 1);
  first.before = [&] { gate.wait(); };
  lane.submit(std::move(first));
  for (const std::uintptr_t number : {2U, 3U, 4U}) {
    lane.submit(job_in(one, number));
  }
  for (const std::uintptr_t number : {11U, 12U}) {
    lane.submit(job_in(other, number));
  }
  gate.open();
  lane.drain();
  EXPECT_EQ(order, (std::vector<std::uintptr_t>{1, 11, 2, 12, 3, 4}));
}

TEST(WorkerLane, CountsPiecesOfARunAndNotItsJobs) {
  ActivityLog one;
  ActivityLog other;
  std::vector<std::uintptr_t> order;
  Gate gate;
  ScriptedLane lane([&](const Segment& piece) { order.push_back(number_of(piece)); });
  Job first = job_in(one, 1, 3 * kWorkerPiece);
  first.before = [&] { gate.wait(); };
  lane.submit(std::move(first));
  for (const std::uintptr_t number : {11U, 12U, 13U}) {
    lane.submit(job_in(other, number));
  }
  gate.open();
  lane.drain();
  EXPECT_EQ(order, (std::vector<std::uintptr_t>{1, 11, 1, 12, 1, 13}));
}

TEST(WorkerLane, OwesARunNothingForTheTimeInWhichItHadNoJobs) {
  ActivityLog one;
  ActivityLog other;
  std::vector<std::uintptr_t> order;
  ScriptedLane* self = nullptr;
  Gate ready;
  ScriptedLane lane([&](const Segment& piece) {
    ready.wait();
    order.push_back(number_of(piece));
    if (order.size() == 4) {
      self->submit(job_in(other, 11));
      self->submit(job_in(other, 12));
    }
  });
  self = &lane;
  for (std::uintptr_t number = 1; number <= 6; ++number) {
    lane.submit(job_in(one, number));
  }
  ready.open();
  lane.drain();
  lane.drain();  // the others' jobs, too
  EXPECT_EQ(order, (std::vector<std::uintptr_t>{1, 2, 3, 4, 11, 5, 12, 6}));
}

TEST(WorkerLane, ServesTheMostUrgentClassFirstOfWhicheverRun) {
  ActivityLog one;
  ActivityLog other;
  std::vector<std::uintptr_t> order;
  ScriptedLane* self = nullptr;
  Gate ready;
  ScriptedLane lane([&](const Segment& piece) {
    ready.wait();
    order.push_back(number_of(piece));
    if (order.size() == 2) {
      self->submit(job_in(other, 11));
      self->submit(job_in(one, 2, 8, Priority::kFault));
    }
  });
  self = &lane;
  const TicketPtr big = lane.submit(job_in(one, 1, 3 * kWorkerPiece));
  ready.open();
  big->wait();
  lane.drain();
  EXPECT_EQ(order, (std::vector<std::uintptr_t>{1, 1, 2, 11, 1}));
}

TEST(WorkerLane, DrainWaitsForTheJobsOfEveryRun) {
  ScriptedLane lane;
  ActivityLog one;
  ActivityLog other;
  ActivityLog busy;
  std::atomic<bool> stop{false};
  std::jthread others([&] {
    while (!stop) {
      lane.submit(job_in(busy, 9, 8, Priority::kFault))->wait();
    }
  });
  for (int i = 0; i < 300; ++i) {
    const std::vector<TicketPtr> tickets = {lane.submit(job_in(one, 1, 6 * kWorkerPiece)),
                                            lane.submit(job_in(other, 2, 8, Priority::kGradient)),
                                            lane.submit(job_of(3, 8))};
    lane.drain();
    for (const TicketPtr& ticket : tickets) {
      EXPECT_TRUE(ticket->finished());
    }
  }
  stop = true;
}

TEST(WorkerLane, DrainOfAnIdleLaneReturns) {
  ScriptedLane lane;
  lane.drain();
  lane.submit(job_of(1, 8))->wait();
  lane.drain();
}

TEST(WorkerLane, DestructionFinishesWhatWasSubmitted) {
  std::vector<TicketPtr> tickets;
  std::atomic<int> moved{0};
  Gate gate;
  {
    ScriptedLane lane([&](const Segment&) { ++moved; });
    Job first = job_of(1, 8);
    first.before = [&] { gate.wait(); };
    tickets.push_back(lane.submit(std::move(first)));
    for (std::uintptr_t number = 2; number <= 20; ++number) {
      tickets.push_back(lane.submit(job_of(number, 2 * kWorkerPiece)));
    }
    gate.open();
  }
  EXPECT_EQ(moved.load(), 1 + 19 * 2);
  for (const TicketPtr& ticket : tickets) {
    EXPECT_TRUE(ticket->finished());
    EXPECT_NO_THROW(ticket->wait());
  }
}

TEST(WorkerLane, RefusesSegmentsWithoutMemory) {
  ScriptedLane lane;
  Job no_source;
  no_source.segments.push_back({.destination = tag(kFar), .source = nullptr, .bytes = 1});
  EXPECT_THROW(lane.submit(std::move(no_source)), StateError);
  EXPECT_THROW(lane.submit(job_of(1, -1)), StateError);
  EXPECT_EQ(lane.statistics().jobs, 0);
}

TEST(WorkerLane, TakesJobsFromManyThreadsAndLosesNone) {
  std::atomic<Bytes> moved{0};
  ScriptedLane lane([&](const Segment& piece) { moved += piece.bytes; });
  std::vector<std::jthread> threads;
  for (std::uintptr_t thread = 1; thread <= 4; ++thread) {
    threads.emplace_back([&lane, thread] {
      for (int i = 0; i < 200; ++i) {
        lane.submit(job_of(thread, 3, static_cast<Priority>(i % 3)));
      }
    });
  }
  threads.clear();
  lane.drain();
  EXPECT_EQ(moved.load(), 4 * 200 * 3);
  EXPECT_EQ(lane.statistics().jobs, 800);
}

}  // namespace
}  // namespace hydra
