// Two runs' views of one device: each has the figures of its own jobs. The contract suite covers what a view can do.
#include "csrc/transfer/shared_backend.h"

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "csrc/base/errors.h"
#include "csrc/transfer/simulated_device.h"
#include "tests/cpp/support.h"

namespace hydra {
namespace {

using test::copy_job;
using test::Gate;
using test::random_bytes;

class SharedViews : public ::testing::TestWithParam<bool> {
  const std::vector<std::uint8_t> source_ = random_bytes(5000, 1);
  std::deque<std::vector<std::uint8_t>> targets_;  // one for each job, since jobs of two lanes move at the same time

 protected:
  /// A job that moves so many bytes, with this number of a block in the log.
  Job job_of(Bytes bytes, std::int32_t block = 0) {
    const auto size = static_cast<std::size_t>(bytes);
    Job job = copy_job(targets_.emplace_back(size).data(), std::span(source_).first(size));
    job.label = {.block = block};
    return job;
  }

  std::shared_ptr<SimulatedDevice> device_ =
      std::make_shared<SimulatedDevice>(SimulatedDeviceOptions{.asynchronous = GetParam(), .seed = 3});
  std::unique_ptr<DeviceBackend> one_ = std::make_unique<SharedBackend>(device_);
  std::unique_ptr<DeviceBackend> other_ = std::make_unique<SharedBackend>(device_);
};

std::vector<std::int32_t> blocks_of(const ActivityRecord& record) {
  std::vector<std::int32_t> blocks;
  for (const Activity& activity : record.activities) {
    blocks.push_back(activity.label.block);
  }
  return blocks;
}

TEST_P(SharedViews, StatisticsAreThoseOfTheRunsOwnJobs) {
  one_->to_device().submit(job_of(1000));
  other_->to_device().submit(job_of(300));
  other_->to_device().submit(job_of(500));
  other_->to_host().submit(job_of(70));
  one_->to_device().drain();
  other_->to_device().drain();
  other_->to_host().drain();
  const LaneStatistics own = one_->to_device().statistics();
  const LaneStatistics others = other_->to_device().statistics();
  EXPECT_EQ(own.bytes, 1000);
  EXPECT_EQ(own.jobs, 1);
  EXPECT_EQ(others.bytes, 800);
  EXPECT_EQ(others.jobs, 2);
  EXPECT_EQ(one_->to_host().statistics().jobs, 0);
  EXPECT_EQ(other_->to_host().statistics().bytes, 70);
  const LaneStatistics whole = device_->to_device().statistics();
  EXPECT_EQ(whole.bytes, own.bytes + others.bytes);
  EXPECT_EQ(whole.jobs, own.jobs + others.jobs);
  EXPECT_NEAR(whole.busy_seconds, own.busy_seconds + others.busy_seconds, 1e-9);
}

TEST_P(SharedViews, AFailureCountsForItsOwnRun) {
  Job job = job_of(1000);
  job.before = [] { throw std::runtime_error("broken on purpose"); };
  const TicketPtr failed = one_->to_host().submit(std::move(job));
  const TicketPtr next = other_->to_host().submit(job_of(10));
  EXPECT_THROW(failed->wait(), std::runtime_error);
  EXPECT_NO_THROW(next->wait());
  const LaneStatistics own = one_->to_host().statistics();
  EXPECT_EQ(own.jobs, 1);
  EXPECT_EQ(own.failures, 1);
  EXPECT_EQ(own.bytes, 0);
  EXPECT_EQ(other_->to_host().statistics().failures, 0);
  EXPECT_EQ(other_->to_host().statistics().bytes, 10);
}

TEST_P(SharedViews, AJobThatTheLaneRefusesIsNoJob) {
  Job job;
  job.segments.push_back({.destination = nullptr, .source = nullptr, .bytes = 1});
  EXPECT_THROW(one_->to_device().submit(std::move(job)), StateError);
  one_->to_device().drain();
  EXPECT_EQ(one_->to_device().statistics().jobs, 0);
}

TEST_P(SharedViews, DrainWaitsForTheRunsOwnJobsOnly) {
  Gate gate;
  const TicketPtr own = one_->to_device().submit(job_of(1000));
  Job held = job_of(10);
  held.before = [&] { gate.wait(); };
  const TicketPtr others = other_->to_device().submit(std::move(held));
  one_->to_device().drain();
  EXPECT_TRUE(own->finished());
  EXPECT_FALSE(others->finished());
  gate.open();
  other_->to_device().drain();
  EXPECT_TRUE(others->finished());
}

TEST_P(SharedViews, ALogHoldsTheCopiesOfItsOwnRun) {
  device_->activity().start(100);
  one_->activity().start(100);
  other_->activity().start(100);
  for (int i = 0; i < 3; ++i) {
    one_->to_device().submit(job_of(1000, 1));
    other_->to_device().submit(job_of(1000, 2));
    other_->to_host().submit(job_of(10, 2));
  }
  one_->to_device().drain();
  other_->to_device().drain();
  other_->to_host().drain();
  EXPECT_EQ(blocks_of(one_->activity().stop()), std::vector<std::int32_t>(3, 1));
  EXPECT_EQ(blocks_of(other_->activity().stop()), std::vector<std::int32_t>(6, 2));
  EXPECT_TRUE(device_->activity().stop().activities.empty());
}

TEST_P(SharedViews, ALogThatIsOffHoldsNothingThoughAnotherIsOn) {
  one_->activity().start(100);
  other_->to_device().submit(job_of(1000, 2))->wait();
  one_->to_device().submit(job_of(1000, 1))->wait();
  other_->activity().start(100);
  EXPECT_EQ(blocks_of(one_->activity().stop()), std::vector<std::int32_t>(1, 1));
  EXPECT_TRUE(other_->activity().stop().activities.empty());
}

TEST_P(SharedViews, AViewEndsBehindItsJobsAndTheDeviceWithTheLastView) {
  const std::weak_ptr<SimulatedDevice> device = device_;
  std::unique_ptr<DeviceBackend> view = std::make_unique<SharedBackend>(device_);
  EXPECT_EQ(&view->slots(), &device_->slots());
  EXPECT_EQ(view->name(), device_->name());
  const TicketPtr ticket = view->to_device().submit(job_of(5000));
  view.reset();
  EXPECT_TRUE(ticket->finished());
  device_.reset();
  EXPECT_FALSE(device.expired());
  EXPECT_NO_THROW(one_->to_device().submit(job_of(10))->wait());
}

INSTANTIATE_TEST_SUITE_P(Simulated, SharedViews, ::testing::Bool(),
                         [](const auto& mode) { return std::string(mode.param ? "asynchronous" : "plain"); });

}  // namespace
}  // namespace hydra
