#include "csrc/pytorch/memory/copy_store.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "csrc/base/errors.h"

namespace hydra {

namespace {

class CopyInMemory final : public StoredCopy {
 public:
  explicit CopyInMemory(ArenaRegionPtr region) : region_(std::move(region)) {}

  TicketPtr receive(Lane& to_host, CopyTransfer from) override {
    return move(to_host, {region_->data(), from.device, from.bytes}, from);
  }
  TicketPtr give(Lane& to_device, CopyTransfer to) override {
    return move(to_device, {to.device, region_->data(), to.bytes}, to);
  }

 private:
  TicketPtr move(Lane& lane, Segment segment, CopyTransfer& transfer) {
    Job job;
    job.segments = {segment};
    job.priority = transfer.priority;
    job.fences = {std::move(transfer.fence)};
    job.after = [region = region_, owner = std::move(transfer.owner), after = std::move(transfer.after)] {
      if (after) {
        after();
      }
    };
    return lane.submit(std::move(job));
  }

  const ArenaRegionPtr region_;
};

/// Waits for the chunk before, so that a lane with several jobs under way takes no staging behind a failed one.
void expect_success(const TicketPtr& earlier) {
  if (earlier) {
    earlier->wait();
  }
}

}  // namespace

/// A copy in several extents, each with one chunk.
class CopyOnDisk final : public StoredCopy, public std::enable_shared_from_this<CopyOnDisk> {
 public:
  /// Takes no extents yet.
  CopyOnDisk(std::shared_ptr<CopyStore> store, Bytes bytes)
      : store_(std::move(store)), disk_(store_->disk()), bytes_(bytes) {}
  ~CopyOnDisk() override {
    for (const std::int32_t extent : extents_) {
      disk_->free(extent);
    }
  }

  void take_extents() {
    for (Bytes begin = 0; begin < bytes_; begin += store_->chunk_bytes_) {
      extents_.reserve(extents_.size() + 1);  // so that none is lost
      extents_.push_back(disk_->take(std::min(store_->chunk_bytes_, bytes_ - begin)));
    }
  }

  TicketPtr receive(Lane& to_host, CopyTransfer from) override {
    const auto passage = std::make_shared<Passage>(shared_from_this(), std::move(from));
    return submit(to_host, passage, [&](Job& job, std::size_t index, const TicketPtr& earlier) {
      job.segments = {{nullptr, passage->device(index), passage->bytes(index)}};
      job.before = [passage, index, earlier] {
        expect_success(earlier);
        passage->memory[index] = passage->store().departing_->take(passage->store().chunk_bytes_);
      };
      job.locate = [passage, index](std::vector<Segment>& segments) {
        segments.front().destination = passage->memory[index]->data();
      };
      job.after = [passage, index] {
        passage->begin_moving(index, DiskDirection::kWrite);
        passage->memory[index].reset();
        if (passage->is_last(index)) {  // if a write fails, the device has to have all bytes still
          passage->finish_writing();
        }
      };
    });
  }

  TicketPtr give(Lane& to_device, CopyTransfer to) override {
    const auto passage = std::make_shared<Passage>(shared_from_this(), std::move(to));
    return submit(to_device, passage, [&](Job& job, std::size_t index, const TicketPtr& earlier) {
      job.segments = {{passage->device(index), nullptr, passage->bytes(index)}};
      job.before = [passage, index, earlier] {
        expect_success(earlier);
        passage->read(index);
      };
      job.locate = [passage, index](std::vector<Segment>& segments) {
        segments.front().source = passage->memory[index]->data();
      };
      job.after = [passage, index] {
        passage->memory[index].reset();
        if (passage->is_last(index)) {
          passage->finish();
        }
      };
    });
  }

 private:
  /// One transfer of all chunks. The lane's functions use it one after another.
  struct Passage {
    Passage(std::shared_ptr<CopyOnDisk> of, CopyTransfer transfer)
        : copy(std::move(of)),
          transfer(std::move(transfer)),
          memory(copy->extents_.size()),
          moving(copy->extents_.size()) {}

    CopyStore& store() const { return *copy->store_; }
    bool is_last(std::size_t index) const { return index + 1 == memory.size(); }
    Bytes begin(std::size_t index) const { return static_cast<Bytes>(index) * store().chunk_bytes_; }
    Bytes bytes(std::size_t index) const {
      return std::clamp<Bytes>(transfer.bytes - begin(index), 0, store().chunk_bytes_);
    }
    std::byte* device(std::size_t index) const { return static_cast<std::byte*>(transfer.device) + begin(index); }

    void begin_moving(std::size_t index, DiskDirection direction) {
      moving[index] = copy->disk_->submit({.direction = direction,
                                           .extent = copy->extents_[index],
                                           .data = memory[index]->data(),
                                           .owner = memory[index]});
    }

    /// Reads a chunk, and begins with the next one if there is staging.
    void read(std::size_t index) {
      if (!moving[index]) {
        memory[index] = store().returning_->take(store().chunk_bytes_);
        begin_moving(index, DiskDirection::kRead);
      }
      if (!is_last(index)) {
        memory[index + 1] = store().ahead_->take(store().chunk_bytes_, /*wait=*/false);
        if (memory[index + 1]) {
          begin_moving(index + 1, DiskDirection::kRead);
        }
      }
      moving[index]->wait();
    }

    void finish() {
      for (const TicketPtr& ticket : moving) {
        ticket->wait();
      }
      if (transfer.after) {
        transfer.after();
      }
    }

    void finish_writing() {
      try {
        finish();
        store().note_write("");
      } catch (const SpillError& error) {
        store().note_write(error.what());
        throw;
      }
    }

    const std::shared_ptr<CopyOnDisk> copy;
    const CopyTransfer transfer;
    std::vector<ArenaRegionPtr> memory;  // staging of chunks on their way
    std::vector<TicketPtr> moving;       // the disk's
  };
  using PassagePtr = std::shared_ptr<Passage>;

  /// Submits a job for each chunk, which `fill` fills. Returns the last one's ticket.
  static TicketPtr submit(Lane& lane, const PassagePtr& passage,
                          const std::function<void(Job&, std::size_t, const TicketPtr&)>& fill) {
    TicketPtr last;
    for (std::size_t index = 0; index < passage->memory.size(); ++index) {
      Job job;
      job.priority = passage->transfer.priority;
      job.fences = {passage->transfer.fence};
      fill(job, index, last);
      last = lane.submit(std::move(job));
    }
    return last;
  }

  const std::shared_ptr<CopyStore> store_;
  const std::shared_ptr<CopyDisk> disk_;
  const Bytes bytes_;
  std::vector<std::int32_t> extents_;
};

CopyStore::CopyStore(std::shared_ptr<HostArena> arena)
    : buffers_(std::make_shared<HostBuffers>(arena)),
      departing_(std::make_shared<WorkingMemory>(arena, kDeparting)),
      returning_(std::make_shared<WorkingMemory>(arena, kReturning)),
      ahead_(std::make_shared<WorkingMemory>(std::move(arena), kAhead)) {}

CopyStore::~CopyStore() = default;

void CopyStore::limit(Bytes bytes, std::string folder, std::shared_ptr<FileOperations> files) {
  const Bytes chunk = bytes / (2 * kStaged) / kDiskAlignment * kDiskAlignment;
  if (bytes >= kLeastBytes) {
    chunk_bytes_ = std::clamp(chunk, kDiskAlignment, kMostChunkBytes);
  }
  buffers_->limit(bytes - kStaged * chunk_bytes_);
  limit_ = {.bytes = bytes, .folder = std::move(folder), .files = std::move(files)};
}

StoredCopyPtr CopyStore::make(Bytes bytes) {
  try {
    return std::make_shared<CopyInMemory>(buffers_->take(bytes));
  } catch (const OutOfMemory&) {
    if (chunk_bytes_ == 0) {
      throw;
    }
  }
  auto copy = std::make_shared<CopyOnDisk>(shared_from_this(), bytes);
  copy->take_extents();
  return copy;
}

std::string CopyStore::obstacle() const {
  if (!limit_ || chunk_bytes_ > 0) {
    const std::lock_guard lock(mutex_);
    return failed_write_;
  }
  return "host_budget= leaves " + human_bytes(limit_->bytes) + " for saved tensors, which need " +
         human_bytes(kLeastBytes) + " on their way to the disk: raise it by " +
         human_bytes(kLeastBytes - limit_->bytes);
}

void CopyStore::note_write(std::string error) {
  const std::lock_guard lock(mutex_);
  failed_write_ = std::move(error);
}

std::shared_ptr<CopyDisk> CopyStore::disk() {
  const std::lock_guard lock(mutex_);
  if (!disk_) {
    disk_ = std::make_shared<CopyDisk>(limit_->folder, limit_->files);
  }
  return disk_;
}

void CopyStore::close() noexcept {
  buffers_->close();
  std::shared_ptr<CopyDisk> disk;  // destroyed without the mutex
  const std::lock_guard lock(mutex_);
  disk = std::move(disk_);
  if (disk) {
    count_moved(*disk, moved_);
    given_up_ = disk;
  }
}

void CopyStore::count_moved(const CopyDisk& disk, CopyStatistics& statistics) {
  const LaneStatistics writes = disk.statistics(DiskDirection::kWrite);
  const LaneStatistics reads = disk.statistics(DiskDirection::kRead);
  statistics.written_bytes = writes.bytes;
  statistics.read_bytes = reads.bytes;
  statistics.writing_seconds = writes.busy_seconds;
  statistics.reading_seconds = reads.busy_seconds;
}

CopyStatistics CopyStore::statistics() const {
  std::shared_ptr<CopyDisk> disk;  // destroyed without the mutex
  const std::lock_guard lock(mutex_);
  disk = disk_ ? disk_ : given_up_.lock();
  CopyStatistics statistics = moved_;
  statistics.host_bytes = buffers_->lent_bytes();
  statistics.peak_host_bytes = buffers_->peak_bytes() + departing_->bytes() + returning_->bytes() + ahead_->bytes();
  if (disk) {
    statistics.disk_bytes = disk->bytes();
    count_moved(*disk, statistics);
  }
  return statistics;
}

}  // namespace hydra
