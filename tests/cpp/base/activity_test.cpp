#include "csrc/base/activity.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <latch>
#include <map>
#include <thread>
#include <vector>

#include "csrc/base/errors.h"

namespace hydra {
namespace {

using Row = ActivityRow;
using Kind = ActivityKind;

void add(ActivityLog& log, Row row, std::int32_t block, Bytes bytes = 1) {
  log.add_since(ActivityLog::Clock::now(), row, Kind::kCopy, {.block = block}, bytes);
}

TEST(ActivityLog, RecordsNothingWhileItIsOff) {
  ActivityLog log;
  EXPECT_FALSE(log.recording());
  EXPECT_EQ(log.now(), Activity::Time{});
  add(log, Row::kToDevice, 0);
  log.start(10);
  EXPECT_TRUE(log.recording());
  log.add_since({}, Row::kToDevice, Kind::kCopy);  // began while it was off
  const ActivityRecord record = log.stop();
  EXPECT_FALSE(log.recording());
  add(log, Row::kToDevice, 0);
  EXPECT_TRUE(record.activities.empty());
  EXPECT_EQ(record.dropped, 0);
  log.start(10);
  EXPECT_TRUE(log.stop().activities.empty());
}

TEST(ActivityLog, KeepsWhatItIsTold) {
  ActivityLog log;
  log.start(10);
  const Activity::Time begin = log.now();
  log.add_since(begin, Row::kToHost, Kind::kCopy, {.block = 7, .part = "weight"}, 12);
  log.add({.time = log.now(), .bytes = {1, 2, 3, 4}});
  const ActivityRecord record = log.stop();
  ASSERT_EQ(record.activities.size(), 1U);
  const Activity& one = record.activities.front();
  EXPECT_EQ(one.row, Row::kToHost);
  EXPECT_EQ(one.kind, Kind::kCopy);
  EXPECT_EQ(one.label.block, 7);
  EXPECT_EQ(one.label.part, "weight");
  EXPECT_EQ(one.bytes, 12);
  EXPECT_EQ(one.begin, begin);
  EXPECT_LE(record.begin, one.begin);
  EXPECT_LE(one.begin, one.end);
  EXPECT_LE(one.end, record.end);
  ASSERT_EQ(record.memory.size(), 1U);
  EXPECT_EQ(record.memory.front().bytes[2], 3);
}

TEST(ActivityLog, KeepsAsMuchAsThereIsRoomForAndCountsTheRest) {
  ActivityLog log;
  log.start(10);
  for (std::int32_t i = 0; i < 25; ++i) {
    add(log, Row::kToDevice, i);
  }
  log.add({.time = log.now()});
  const ActivityRecord record = log.stop();
  ASSERT_EQ(record.activities.size(), 10U);
  EXPECT_EQ(record.activities.capacity(), 10U);
  EXPECT_EQ(record.activities.back().label.block, 9);
  EXPECT_EQ(record.memory.size(), 1U);
  EXPECT_EQ(record.dropped, 15);
}

TEST(ActivityLog, IsNotStartedTwiceNorStoppedTwice) {
  ActivityLog log;
  EXPECT_THROW(log.stop(), StateError);
  log.start(10);
  add(log, Row::kToDevice, 0);
  EXPECT_THROW(log.start(10), StateError);
  EXPECT_EQ(log.stop().activities.size(), 1U) << "the first one goes on";
  EXPECT_THROW(log.stop(), StateError);
}

TEST(ActivityLog, WhatBeganBeforeItWasStartedBeginsWithIt) {
  ActivityLog log;
  log.start(10);
  const Activity::Time early = log.now();
  log.stop();
  log.start(10);
  log.add_since(early, Row::kToDevice, Kind::kCopy);
  const ActivityRecord record = log.stop();
  ASSERT_EQ(record.activities.size(), 1U);
  EXPECT_EQ(record.activities.front().begin, record.begin);
  EXPECT_LE(record.activities.front().begin, record.activities.front().end);
}

TEST(ActivityLog, LosesNothingOfSeveralThreads) {
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  ActivityLog log;
  log.start(kThreads * kEach);
  std::latch all_there(kThreads);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&log, &all_there, thread] {
      all_there.arrive_and_wait();
      for (int i = 0; i < kEach; ++i) {
        add(log, Row::kToDevice, thread, i);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::map<std::int32_t, Bytes> sums;
  const ActivityRecord record = log.stop();
  for (const Activity& activity : record.activities) {
    sums[activity.label.block] += activity.bytes;
  }
  EXPECT_EQ(record.dropped, 0);
  for (std::int32_t thread = 0; thread < kThreads; ++thread) {
    EXPECT_EQ(sums[thread], kEach * (kEach - 1) / 2);
  }
}

TEST(ActivityLog, MayBeStoppedWhileThreadsAddToIt) {
  ActivityLog log;
  std::atomic<bool> ending = false;
  std::latch begun(2);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 2; ++thread) {
    threads.emplace_back([&] {
      begun.count_down();
      while (!ending) {
        add(log, Row::kCompute, 1);
      }
    });
  }
  begun.wait();
  for (int i = 0; i < 200; ++i) {
    log.start(50);
    EXPECT_LE(log.stop().activities.size(), 50U);
  }
  ending = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(ActivityLog, NumbersTheThreadsThatCompute) {
  ActivityLog log;
  log.start(10);
  std::thread([&log] { add(log, Row::kToDevice, 0); }).join();  // a lane's thread does not count
  add(log, Row::kCompute, 1);
  std::thread([&log] { add(log, Row::kCompute, 2); }).join();
  add(log, Row::kCompute, 3);
  std::vector<std::int32_t> threads;
  for (const Activity& activity : log.stop().activities) {
    threads.push_back(activity.thread);
  }
  EXPECT_EQ(threads, (std::vector<std::int32_t>{0, 0, 1, 0}));
}

TEST(ActivityLog, ThreadsBeyondTheMostCountAsTheLast) {
  constexpr std::int32_t kLast = ActivityLog::kThreads - 1;
  ActivityLog log;
  log.start(100);
  std::latch all_there(kLast + 3);  // so that no thread's id is used again
  std::vector<std::thread> threads;
  for (std::int32_t i = 0; i < kLast + 3; ++i) {
    threads.emplace_back([&] {
      add(log, Row::kCompute, 0);
      all_there.arrive_and_wait();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::map<std::int32_t, int> counts;
  for (const Activity& activity : log.stop().activities) {
    ++counts[activity.thread];
  }
  EXPECT_EQ(counts.rbegin()->first, kLast);
  EXPECT_EQ(counts[kLast], 3);
}

TEST(ActivityLog, APassIsAnActivityAndTheNameOfTheOthers) {
  ActivityLog log;
  log.begin_pass(PassKind::kForward);
  log.end_pass();
  log.start(10);
  add(log, Row::kToDevice, 0);
  log.begin_pass(PassKind::kBackward);
  add(log, Row::kToDevice, 1);
  std::thread([&log] { log.end_pass(); }).join();
  add(log, Row::kToDevice, 2);
  const std::vector<Activity> all = log.stop().activities;
  ASSERT_EQ(all.size(), 4U);
  EXPECT_EQ(all[0].pass.number, 0);
  EXPECT_EQ(all[1].pass.number, 2) << "passes are counted while the log is off, too";
  EXPECT_EQ(all[1].pass.kind, PassKind::kBackward);
  EXPECT_EQ(all[2].kind, Kind::kPass);
  EXPECT_EQ(all[2].row, Row::kCompute);
  EXPECT_EQ(all[2].pass.number, 2);
  EXPECT_LE(all[2].begin, all[1].begin);
  EXPECT_GE(all[2].end, all[1].end);
  EXPECT_EQ(all[3].pass.number, 0);
}

TEST(ActivityLog, APassThatBeganWhileItWasOffIsNoActivity) {
  ActivityLog log;
  log.begin_pass(PassKind::kForward);
  log.start(10);
  log.end_pass();
  EXPECT_TRUE(log.stop().activities.empty());
}

TEST(ActivityLog, ARangeIsAnActivityOnEveryWayOut) {
  ActivityLog log;
  log.start(10);
  try {
    const ActivityRange range(log, Row::kCompute, Kind::kWaitForFault, {.block = 3});
    throw StateError("out");
  } catch (const StateError&) {
    add(log, Row::kCompute, 4);
  }
  const std::vector<Activity> all = log.stop().activities;
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].kind, Kind::kWaitForFault);
  EXPECT_EQ(all[0].label.block, 3);
  EXPECT_LE(all[0].end, all[1].begin);
}

TEST(ActivityLog, AForkedChildRecordsNothing) {
  ActivityLog log;
  log.start(10);
  const pid_t child = ::fork();
  if (child == 0) {
    add(log, Row::kCompute, 0);
    log.begin_pass(PassKind::kForward);
    log.end_pass();
    log.add({.time = log.now()});
    const ActivityRecord record = log.stop();
    ::_exit(record.activities.empty() && record.memory.empty() ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace hydra
