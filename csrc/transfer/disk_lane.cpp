#include "csrc/transfer/disk_lane.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "csrc/base/clock.h"
#include "csrc/base/device_turns.h"
#include "csrc/base/errors.h"

namespace hydra {

DiskLane::DiskLane(SpillFile& file, int threads) : file_(file), several_(threads > 1) {
  try {
    for (int i = 0; i < threads; ++i) {
      threads_->emplace_back([this] { run(); });
    }
  } catch (const std::system_error& error) {
    stop();
    throw SpillError("the threads for transfers of spill_dir '" + file.folder() +
                     "' could not start: " + std::string(error.what()));
  }
}

DiskLane::~DiskLane() {
  if (!home_.here()) {
    return;
  }
  drain();
  stop();
}

void DiskLane::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_->notify_all();
  for (std::thread& thread : *threads_) {
    thread.join();
  }
}

TicketPtr DiskLane::submit(DiskJob job) {
  home_.expect_here();
  HYDRA_EXPECT(job.data != nullptr && reinterpret_cast<std::uintptr_t>(job.data) % kDiskAlignment == 0, StateError,
               "the memory of a transfer is null, or not aligned to " + std::to_string(kDiskAlignment) + " bytes");
  auto running = std::make_shared<Running>();
  running->pieces = file_.pieces(job.extent);
  running->ticket = std::make_shared<Ticket>(file_.bytes(job.extent));
  running->job = std::move(job);
  TicketPtr ticket = running->ticket;
  {
    const std::lock_guard lock(mutex_);
    running->sequence = submitted_++;
    unfinished_.push_back(running);
    waiting_[static_cast<std::size_t>(running->job.direction)].push_back(std::move(running));
  }
  changed_->notify_all();
  return ticket;
}

void DiskLane::drain() noexcept {
  if (!home_.here()) {
    return;
  }
  std::unique_lock lock(mutex_);
  const std::int64_t all = submitted_;
  wait_in_pause(lock, *changed_, [&] { return unfinished_.empty() || unfinished_.front()->sequence >= all; });
}

LaneStatistics DiskLane::statistics(DiskDirection direction) const {
  const std::lock_guard lock(mutex_);
  return statistics_[static_cast<std::size_t>(direction)];
}

DiskLane::RunningPtr DiskLane::held_back_by(const Running& running) const noexcept {
  const auto found = std::find_if(unfinished_.begin(), unfinished_.end(), [&](const RunningPtr& other) {
    const bool both_read =
        running.job.direction == DiskDirection::kRead && other->job.direction == DiskDirection::kRead;
    return other->sequence < running.sequence && other->job.extent == running.job.extent && !both_read;
  });
  return found == unfinished_.end() ? nullptr : *found;
}

DiskLane::RunningPtr DiskLane::next() const noexcept {
  const auto first = [this](DiskDirection direction) -> RunningPtr {
    for (const RunningPtr& running : waiting_[static_cast<std::size_t>(direction)]) {
      const RunningPtr before = running->next > 0 ? nullptr : held_back_by(*running);
      if (!before) {
        return running;
      }
      if (before->next < before->pieces && !held_back_by(*before)) {
        return before;
      }
    }
    return nullptr;
  };
  const bool for_writes = several_ && writing_ == 0;
  RunningPtr found = first(for_writes ? DiskDirection::kWrite : DiskDirection::kRead);
  return found ? found : first(for_writes ? DiskDirection::kRead : DiskDirection::kWrite);
}

DiskLane::RunningPtr DiskLane::take_piece(std::int64_t& piece) noexcept {
  RunningPtr running = next();
  if (running) {
    if (running->next == 0) {
      running->begin = Clock::now();
      running->ticket->mark_enqueued();
    }
    piece = running->next++;
    if (running->next == running->pieces) {
      std::erase(waiting_[static_cast<std::size_t>(running->job.direction)], running);
    }
  }
  return running;
}

void DiskLane::run() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::int64_t piece = 0;
    RunningPtr running = take_piece(piece);
    if (!running) {
      if (stopping_) {
        return;
      }
      changed_->wait(lock);
      continue;
    }
    const bool failed = running->error != nullptr;
    const int writes = running->job.direction == DiskDirection::kWrite ? 1 : 0;
    writing_ += writes;
    lock.unlock();
    std::exception_ptr error;
    Bytes bytes = 0;
    if (!failed) {
      try {
        move(*running, piece);
        bytes = file_.piece_bytes(running->job.extent, piece);
      } catch (...) {  // the ticket carries the error
        error = std::current_exception();
      }
    }
    lock.lock();
    writing_ -= writes;
    if (end_piece(*running, std::move(error), bytes)) {
      lock.unlock();
      finish(*running);
      lock.lock();
      unfinished_.remove(running);
      changed_->notify_all();
    }
  }
}

void DiskLane::move(Running& running, std::int64_t piece) {
  const DiskJob& job = running.job;
  if (job.direction == DiskDirection::kRead) {
    file_.read_piece(job.extent, piece, job.data);
  } else {
    file_.write_piece(job.extent, piece, job.data);
  }
}

bool DiskLane::end_piece(Running& running, std::exception_ptr error, Bytes bytes) noexcept {
  LaneStatistics& statistics = statistics_[static_cast<std::size_t>(running.job.direction)];
  statistics.bytes += bytes;
  if (error && !running.error) {
    running.error = std::move(error);
  }
  if (++running.ended < running.pieces) {
    return false;
  }
  running.seconds = seconds_since(running.begin);
  ++statistics.jobs;
  statistics.failures += running.error ? 1 : 0;
  statistics.busy_seconds += running.seconds;
  return true;
}

void DiskLane::finish(Running& running) noexcept {
  running.job.owner.reset();
  if (running.error) {
    running.ticket->fail(running.error);
  } else {
    running.ticket->complete(running.seconds);
  }
}

}  // namespace hydra
