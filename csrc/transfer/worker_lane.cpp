#include "csrc/transfer/worker_lane.h"

#include <algorithm>
#include <utility>

#include "csrc/base/device_turns.h"
#include "csrc/base/errors.h"

namespace hydra {

TicketPtr WorkerLane::submit(Job job) {
  home_.expect_here();
  expect_memory(job);
  Pending pending;
  pending.ticket = std::make_shared<Ticket>(job.bytes());
  pending.submitted = Clock::now();
  TicketPtr ticket = pending.ticket;
  pending.job = std::move(job);
  {
    const std::lock_guard lock(mutex_);
    HYDRA_EXPECT(!stopping_, StateError, "this lane is closing and takes no more jobs");
    pending.sequence = submitted_ + 1;
    Queue& queue = flow_of(pending.job).queues.at(static_cast<std::size_t>(pending.job.priority));
    queue.push_back(std::move(pending));
    ++submitted_;
  }
  changed_->notify_all();  // without the mutex, which the worker takes as it wakes
  return ticket;
}

void WorkerLane::drain() noexcept {
  if (!home_.here()) {
    return;
  }
  std::unique_lock lock(mutex_);
  const std::int64_t last = submitted_;
  wait_in_pause(lock, *changed_, [this, last] {
    return std::ranges::all_of(flows_, [last](const Flow& flow) {
      return std::ranges::all_of(flow.queues,
                                 [last](const Queue& queue) { return queue.empty() || queue.front().sequence > last; });
    });
  });
}

LaneStatistics WorkerLane::statistics() const noexcept {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void WorkerLane::start() {
  *thread_ = std::thread([this] { run(); });
}

void WorkerLane::stop() noexcept {
  if (!home_.here() || !thread_->joinable()) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_->notify_all();
  }
  thread_->join();
}

void WorkerLane::run() noexcept {
  on_thread_start();
  std::unique_lock lock(mutex_);
  for (;;) {
    Next chosen;
    changed_->wait(lock, [this, &chosen] {
      chosen = next();
      return chosen.queue != nullptr || stopping_;
    });
    if (chosen.queue == nullptr) {
      return;
    }
    // Stays valid without the lock: other threads only append, and then a deque keeps its elements in place.
    Pending& pending = chosen.queue->front();
    const double worked = pending.seconds;
    lock.unlock();
    bool ended = true;
    std::exception_ptr error;
    try {
      ended = advance(pending);
    } catch (...) {
      error = std::current_exception();
    }
    const double seconds = pending.seconds - worked;
    if (ended) {
      finish(pending, std::move(error));
    }
    lock.lock();
    chosen.flow->seconds += seconds;
    if (ended) {
      chosen.queue->pop_front();
      forget_idle(*chosen.flow);
      changed_->notify_all();
    }
  }
}

WorkerLane::Flow& WorkerLane::flow_of(const Job& job) {
  double least = flows_.empty() ? 0.0 : flows_.front().seconds;
  for (Flow& flow : flows_) {
    if (flow.run == job.log) {
      return flow;
    }
    least = std::min(least, flow.seconds);
  }
  // A run that had no jobs is owed nothing for that time.
  return flows_.emplace_back(Flow{.run = job.log, .seconds = least});
}

WorkerLane::Next WorkerLane::next() noexcept {
  Next found;
  std::size_t priority = std::tuple_size_v<decltype(Flow::queues)>;
  for (Flow& flow : flows_) {
    const auto queue = std::ranges::find_if(flow.queues, [](const Queue& each) { return !each.empty(); });
    const auto its = static_cast<std::size_t>(queue - flow.queues.begin());
    const bool tied = found.flow != nullptr && its == priority && flow.seconds < found.flow->seconds;
    if (its < priority || tied) {
      found = {.flow = &flow, .queue = &*queue};
      priority = its;
    }
  }
  return found;
}

void WorkerLane::forget_idle(const Flow& flow) noexcept {
  if (flow.run != nullptr && std::ranges::all_of(flow.queues, [](const Queue& queue) { return queue.empty(); })) {
    flows_.remove_if([&flow](const Flow& each) { return &each == &flow; });
  }
}

bool WorkerLane::advance(Pending& pending) {
  if (!pending.begun) {
    pending.begun = true;
    if (pending.job.before || pending.job.locate) {
      run_host_function(pending.job, [&job = pending.job] { prepare_job(job); });
    }
    runnable_since_ = std::max(pending.submitted, host_function_end_);
    begin(pending.job);
  } else {
    runnable_since_ = std::max(pending.submitted, host_function_end_);
    move_next_piece(pending);
  }
  const std::vector<Segment>& segments = pending.job.segments;
  while (pending.segment < segments.size() && pending.offset == segments[pending.segment].bytes) {
    ++pending.segment;
    pending.offset = 0;
  }
  if (pending.segment < segments.size()) {
    return false;
  }
  run_host_function(pending.job, pending.job.after);
  return true;
}

void WorkerLane::move_next_piece(Pending& pending) {
  const Segment& segment = pending.job.segments[pending.segment];
  const Segment piece{.destination = static_cast<char*>(segment.destination) + pending.offset,
                      .source = static_cast<const char*>(segment.source) + pending.offset,
                      .bytes = std::min(kPieceBytes, segment.bytes - pending.offset)};
  const Clock::time_point begin = activity_.now(pending.job);
  const double seconds = move(piece);
  activity_.moved(pending.sequence, pending.job, pending.moved, piece.bytes, begin, activity_.now(pending.job));
  pending.offset += piece.bytes;
  pending.moved += piece.bytes;
  pending.seconds += seconds;
  const std::lock_guard lock(mutex_);
  statistics_.bytes += piece.bytes;
  statistics_.busy_seconds += seconds;
}

void WorkerLane::run_host_function(const Job& job, const std::function<void()>& function) {
  if (!function) {
    return;
  }
  // A failed function has delayed the lane too.
  struct Stamp {
    WorkerLane& lane;
    const Job& job;
    const Clock::time_point begin;
    ~Stamp() {
      lane.host_function_end_ = Clock::now();
      lane.activity_.host_work(job, begin);
    }
  } const stamp{*this, job, activity_.now(job)};
  function();
}

void WorkerLane::finish(Pending& pending, std::exception_ptr error) noexcept {
  activity_.flush();
  // The job's owners are dropped before the ticket ends: threads that wait for the ticket rely on it.
  pending.job = Job{};
  {
    const std::lock_guard lock(mutex_);
    ++statistics_.jobs;
    statistics_.failures += error ? 1 : 0;
  }
  if (error) {
    pending.ticket->fail(std::move(error));
  } else {
    pending.ticket->complete(pending.seconds);
  }
  pending.ticket.reset();
}

}  // namespace hydra
