// Visits of sites: blocks are pinned, noted and let go. Backward's arrivals, too.
#include "csrc/base/errors.h"
#include "csrc/pytorch/memory/counting_allocator.h"
#include "csrc/pytorch/model/paged_model.h"
#include "csrc/pytorch/threads/error_bridge.h"
#include "csrc/pytorch/threads/gil.h"

namespace py = pybind11;

namespace hydra {

void PagedModel::begin_visit(SiteVisit& visit, const BlockList& blocks, PassKind kind) {
  if (window_.depths().thread == 0) {
    enter(visit.window, kind);
  }
  const py::gil_scoped_release released;
  if (!stays_in(blocks)) {
    arrive(blocks, kind);
    visit.blocks = blocks;
    visit.begin = backend_->activity().now();
  }
}

void PagedModel::returns(SiteVisit& visit, const std::vector<at::Tensor>& outputs) {
  visit.window.graph = marks_.mark(outputs, visit.blocks, shared_from_this());
}

void PagedModel::end_visit(SiteVisit& visit, bool failed) {
  {
    const py::gil_scoped_release released;
    note_compute(visit.blocks, visit.begin);
    leave(std::exchange(visit.blocks, {}));
  }
  exit(visit.window, failed);
}

void PagedModel::record_timeline(std::size_t samples) {
  const std::lock_guard lock(timeline_mutex_);
  timeline_room_ = timeline_.size() + samples;
  timeline_.reserve(timeline_room_);
}

std::vector<MemorySample> PagedModel::timeline() const {
  const std::lock_guard lock(timeline_mutex_);
  return timeline_;
}

void PagedModel::note_timeline(std::int32_t block, PassKind kind) {
  const std::lock_guard lock(timeline_mutex_);
  if (timeline_.size() >= timeline_room_) {
    return;
  }
  MemorySample sample{kind, block, {}};
  const Ledger& ledger = account_->ledger();
  for (std::size_t i = 0; i < kMemoryClasses; ++i) {
    sample.use.by_class[i] = ledger.in_use(static_cast<MemoryClass>(i));
    sample.use.total += sample.use.by_class[i];
  }
  timeline_.push_back(sample);
}

void PagedModel::note_compute(const BlockList& blocks, Activity::Time begin) noexcept {
  for (const std::int32_t block : blocks) {
    backend_->activity().add_since(begin, ActivityRow::kCompute, ActivityKind::kBlock, {.block = block});
  }
}

void PagedModel::note_memory() noexcept {
  static_assert(MemoryMoment::kClasses == kMemoryClasses);
  MemoryMoment moment{.time = backend_->activity().now()};
  if (moment.time != Activity::Time{}) {
    for (std::size_t i = 0; i < kMemoryClasses; ++i) {
      moment.bytes[i] = account_->ledger().in_use(static_cast<MemoryClass>(i));
    }
    backend_->activity().add(moment);
  }
}

void PagedModel::arrive(const BlockList& blocks, PassKind kind) {
  std::size_t arrived = 0;
  try {
    keep_headroom();
    for (; arrived < blocks.size(); ++arrived) {
      latest_block_ = blocks[arrived];
      pager_->arrive(blocks[arrived]);
      note_timeline(blocks[arrived], kind);
      note_memory();
    }
  } catch (...) {  // re-raised: all or none
    leave({blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(arrived)});
    rethrow_for_torch(explain());
  }
}

void PagedModel::keep_headroom() {
  const ReleaseGilIfHeld released;
  while (homes_.any() && backend_->crowded(options_.budget) && !pager_->could_evict() && homes_.give_one_up()) {
  }
}

void PagedModel::leave(const BlockList& blocks) noexcept {
  for (const std::int32_t block : blocks) {
    dropped_copies_ += derived_pages_.drop(block);
    pager_->release(block, AcquireReason::kHook);
  }
}

BlockList PagedModel::exchange_backward_blocks(BlockList next) {
  const std::lock_guard lock(backward_mutex_);
  note_compute(backward_blocks_, backward_begin_);
  backward_begin_ = backend_->activity().now();
  return std::exchange(backward_blocks_, std::move(next));
}

void PagedModel::arrive_backward(const BlockList& blocks) {
  if (closed_ || stays_in(blocks)) {
    return;
  }
  if (window_open()) {
    exchange_thread_charge({.account = thread_account()});  // one backward may run through several models
  }
  sink_->norm().release();
  const BlockList left = exchange_backward_blocks({});
  leave(left);
  note_left(left);
  arrive(blocks, PassKind::kBackward);
  leave(exchange_backward_blocks(blocks));
}

void PagedModel::note_face_written(const Page& page) {
  if (disk_) {
    const ReleaseGilIfHeld released;
    disk_->bring_weights_home(page.block);  // where they are to be written back
  }
  const auto& backing = *backings_[static_cast<std::size_t>(page.block)];
  for (const HostParameter* parameter : backing.parameters()) {
    if (parameter->page.get() == &page) {
      TORCH_CHECK(parameter->same_dtype(), "hydra_ext: the forward writes in place to '", page.name,
                  "', whose device copy is ", parameter->face.scalar_type(), " and whose truth on the host is ",
                  parameter->host.scalar_type(), "; the write would be lost. Leave param_dtype unset for this model");
      parameter->page->written = true;
    }
  }
  pager_->mark_dirty(page.block);
}

}  // namespace hydra
