// The entries that lanes write to the activity log.
#include "csrc/transfer/lane_activity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "csrc/transfer/simulated_device.h"
#include "csrc/transfer/worker_lane.h"
#include "tests/cpp/support.h"

namespace hydra {
namespace {

using test::copy_job;
using test::message_of;
using test::random_bytes;
constexpr Bytes kLanePiece = WorkerLane::kPieceBytes;

/// Moves no bytes, and reports every piece.
class NotingLane final : public WorkerLane {
 public:
  using OnMove = std::function<void()>;
  NotingLane(ActivityLog& log, OnMove on_move) : WorkerLane(&log, ActivityRow::kToHost), on_move_(std::move(on_move)) {
    start();
  }
  ~NotingLane() override { stop(); }

 protected:
  void begin(Job& /*job*/) override {}
  double move(const Segment& /*piece*/) override {
    on_move_();
    return 0.0;
  }

 private:
  const OnMove on_move_;
};

Job job_of(std::int32_t block, std::vector<Bytes> segments, Priority priority = Priority::kPrefetch) {
  static char memory = 0;  // never dereferenced
  Job job;
  for (const Bytes bytes : segments) {
    job.segments.push_back({.destination = &memory, .source = &memory, .bytes = bytes});
  }
  job.priority = priority;
  job.label = {.block = block};
  return job;
}

std::vector<Activity> of_kind(const ActivityRecord& record, ActivityKind kind) {
  std::vector<Activity> found;
  std::ranges::copy_if(record.activities, std::back_inserter(found),
                       [kind](const Activity& activity) { return activity.kind == kind; });
  return found;
}

void expect_apart(std::vector<Activity> activities) {
  std::ranges::sort(activities, {}, &Activity::begin);
  for (std::size_t i = 1; i < activities.size(); ++i) {
    EXPECT_LE(activities[i - 1].end, activities[i].begin);
  }
}

TEST(LaneActivity, AJobIsOneEntryHoweverManyPiecesItHas) {
  ActivityLog log;
  NotingLane lane(log, [] {});
  log.start(100);
  lane.submit(job_of(1, {2 * kLanePiece + 5, 7, 0}));
  lane.submit(job_of(2, {0}));
  lane.submit(job_of(3, {9}))->wait();
  const std::vector<Activity> copies = of_kind(log.stop(), ActivityKind::kCopy);
  ASSERT_EQ(copies.size(), 2U) << "where nothing moves nothing is recorded";
  EXPECT_EQ(copies[0].label.block, 1);
  EXPECT_EQ(copies[0].bytes, 2 * kLanePiece + 12);
  EXPECT_EQ(copies[1].label.block, 3);
  EXPECT_EQ(copies[1].bytes, 9);
  for (const Activity& copy : copies) {
    EXPECT_EQ(copy.row, ActivityRow::kToHost);
    EXPECT_FALSE(copy.continued);
  }
  expect_apart(copies);
}

TEST(LaneActivity, AJobThatIsInterruptedIsSeveralEntriesThatDoNotOverlap) {
  ActivityLog log;
  NotingLane* self = nullptr;
  test::Gate ready;
  int pieces = 0;
  NotingLane lane(log, [&] {
    ready.wait();
    if (++pieces == 1) {
      self->submit(job_of(2, {8}, Priority::kFault));
    }
  });
  self = &lane;
  log.start(100);
  const TicketPtr big = lane.submit(job_of(1, {2 * kLanePiece + 1}));
  ready.open();
  big->wait();
  lane.drain();
  const std::vector<Activity> copies = of_kind(log.stop(), ActivityKind::kCopy);
  ASSERT_EQ(copies.size(), 3U);
  EXPECT_EQ(copies[0].label.block, 1);
  EXPECT_EQ(copies[0].bytes, kLanePiece);
  EXPECT_FALSE(copies[0].continued);
  EXPECT_EQ(copies[1].label.block, 2);
  EXPECT_FALSE(copies[1].continued);
  EXPECT_EQ(copies[2].label.block, 1);
  EXPECT_EQ(copies[2].bytes, kLanePiece + 1);
  EXPECT_TRUE(copies[2].continued);
  expect_apart(copies);
}

TEST(LaneActivity, OfAJobThatFailsTheBytesThatMovedAreThere) {
  ActivityLog log;
  int pieces = 0;
  NotingLane lane(log, [&pieces] {
    if (++pieces == 2) {
      throw std::runtime_error("piece");
    }
  });
  log.start(100);
  EXPECT_EQ(message_of(*lane.submit(job_of(1, {3 * kLanePiece}))), "piece");
  const std::vector<Activity> copies = of_kind(log.stop(), ActivityKind::kCopy);
  ASSERT_EQ(copies.size(), 1U);
  EXPECT_EQ(copies[0].bytes, kLanePiece);
}

TEST(LaneActivity, FunctionsThatHoldTheLaneUpAreThereBesideTheCopies) {
  ActivityLog log;
  NotingLane lane(log, [] {});
  log.start(100);
  const auto busy = [] {
    const auto end = ActivityLog::Clock::now() + std::chrono::microseconds(100);
    while (ActivityLog::Clock::now() < end) {
    }
  };
  Job job = job_of(4, {8});
  job.before = busy;
  job.after = busy;
  lane.submit(std::move(job))->wait();
  const ActivityRecord record = log.stop();
  const std::vector<Activity> work = of_kind(record, ActivityKind::kHostWork);
  ASSERT_EQ(work.size(), 2U);
  EXPECT_EQ(work[0].label.block, 4);
  ASSERT_EQ(record.activities.size(), 3U);
  expect_apart(record.activities);
}

TEST(LaneActivity, OfTheSimulatedDeviceCoversEveryByteInItsDirection) {
  SimulatedDevice device;
  ActivityLog& log = device.activity();
  const std::vector<std::uint8_t> source = random_bytes(3 * kLanePiece + 11, 1);
  std::vector<std::uint8_t> target(source.size());
  Job in = copy_job(target.data(), source);
  in.label = {.block = 5};
  device.to_device().submit(std::move(in))->wait();  // the log is off
  log.start(100);
  Job again = copy_job(target.data(), source);
  again.label = {.block = 6};
  device.to_device().submit(std::move(again))->wait();
  Job out = copy_job(target.data(), source);
  out.label = {.block = 6, .part = "weight"};
  device.to_host().submit(std::move(out))->wait();
  const ActivityRecord record = log.stop();
  const std::vector<Activity> copies = of_kind(record, ActivityKind::kCopy);
  ASSERT_EQ(copies.size(), 2U);
  EXPECT_EQ(copies[0].row, ActivityRow::kToDevice);
  EXPECT_EQ(copies[1].row, ActivityRow::kToHost);
  EXPECT_EQ(copies[1].label.part, "weight");
  for (const Activity& copy : copies) {
    EXPECT_EQ(copy.label.block, 6);
    EXPECT_EQ(copy.bytes, static_cast<Bytes>(source.size()));
    EXPECT_LT(copy.begin, copy.end);
    EXPECT_LE(record.begin, copy.begin);
    EXPECT_LE(copy.end, record.end);
  }
}

}  // namespace
}  // namespace hydra
