#include "emulator/c10_cuda/device_cache.h"

#include <algorithm>
#include <iomanip>
#include <iterator>
#include <sstream>
#include <utility>

#include "emulator/cudart/control.h"

namespace emulated_cuda {

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kUnit = 512;
constexpr std::size_t kLargestSmallRequest = kMiB;
constexpr std::size_t kSmallSegment = 2 * kMiB;
constexpr std::size_t kLargeSegment = 20 * kMiB;
constexpr std::size_t kLeastOwnSegment = 10 * kMiB;
constexpr std::size_t kOwnSegmentUnit = 2 * kMiB;
constexpr int kPoison = 0xFF;

std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

bool is_small(std::size_t bytes) { return bytes <= kLargestSmallRequest; }

std::size_t segment_bytes(std::size_t bytes) {
  if (is_small(bytes)) {
    return kSmallSegment;
  }
  return bytes < kLeastOwnSegment ? kLargeSegment : rounded_up(bytes, kOwnSegmentUnit);
}

std::size_t page_bytes(bool small) { return small ? kSmallSegment : kLargeSegment; }

/// "1.50 GiB", as torch prints sizes.
std::string shown(std::size_t bytes) {
  if (bytes <= 1024) {
    return std::to_string(bytes) + " bytes";
  }
  const bool kib = bytes <= kMiB;
  const bool mib = bytes <= 1024 * kMiB;
  const double unit = kib ? 1024.0 : static_cast<double>(mib ? kMiB : 1024 * kMiB);
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / unit
       << (kib ? " KiB" : (mib ? " MiB" : " GiB"));
  return text.str();
}

template <class Change>
void change(CacheCounters& counters, bool small, const Change& one) {
  one(counters[0]);
  one(counters[small ? 1 : 2]);
}

template <class Change>
void for_all_counters(CacheStats& stats, const Change& one) {
  for (CacheCounters* counters : {&stats.allocations, &stats.segments, &stats.active_blocks, &stats.allocated_bytes,
                                  &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
    std::ranges::for_each(*counters, one);
  }
}

}  // namespace

DeviceCache::DeviceCache(int device, CacheHooks hooks) : device_(device), hooks_(std::move(hooks)) {}

// ---- allocation -----------------------------------------------------------------------------------------------------

void* DeviceCache::allocate(std::size_t bytes, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  const runtime::CaptureAllowed during_capture(stream);
  collect(/*wait=*/false);
  const std::size_t size = rounded_up(bytes, kUnit);
  const Request request{.bytes = size, .pool = &pool_of(size, stream)};
  Place place = take_free(request);
  if (place == blocks_.end() && hooks_.on_miss()) {
    place = take_free(request);
  }
  if (place == blocks_.end()) {
    place = take_new(request);
  }
  if (place == blocks_.end()) {
    release_all();
    ++stats_.retries;
    place = take_new(request);
  }
  if (place == blocks_.end()) {
    ++stats_.failures;
    throw CacheExhausted(exhausted(size));
  }
  return hand_out(place, request, bytes);
}

/// Takes the best free block out of the pool, if there is one.
DeviceCache::Place DeviceCache::take_free(const Request& request) {
  const auto& free = request.pool->free;
  const auto at = [this](const auto& entry) { return blocks_.find(entry->second); };
  auto found = free.lower_bound({request.bytes, nullptr});
  if (hooks_.expandable()) {
    // A block that can grow counts as large as it can become.
    while (found != free.end() && at(found)->second.segment->expandable) {
      const auto next = std::next(found);
      if (next == free.end() || room_to_grow(at(next)) >= room_to_grow(at(found))) {
        break;
      }
      found = next;
    }
  } else {
    // The setting may have been on before: then its segments serve no request now.
    while (found != free.end() && at(found)->second.segment->expandable) {
      ++found;
    }
  }
  if (found == free.end()) {
    return blocks_.end();
  }
  const Place place = at(found);
  take_out(place);
  return place;
}

/// A block of new memory, in no pool.
DeviceCache::Place DeviceCache::take_new(const Request& request) {
  runtime::check(cudaGetLastError());  // an error that a call before has left behind
  const std::size_t bytes = segment_bytes(request.bytes);
  // The limit counts a whole segment, even where an expandable one would grow by less.
  if (allowed_ && static_cast<std::size_t>(stats_.reserved_bytes[0].current) + bytes > *allowed_) {
    return blocks_.end();
  }
  return hooks_.expandable() ? grow(request) : new_segment(request, bytes);
}

DeviceCache::Place DeviceCache::new_segment(const Request& request, std::size_t bytes) {
  void* memory = nullptr;
  if (!runtime::granted(cudaMalloc(&memory, bytes))) {
    return blocks_.end();
  }
  auto* const address = static_cast<std::byte*>(memory);
  Segment& segment = segments_[address];
  segment = {.address = address, .bytes = bytes, .pool = request.pool};
  ++stats_.device_allocations;
  add(stats_.segments, *request.pool, 1);
  add(stats_.reserved_bytes, *request.pool, bytes);
  Block block;
  block.segment = &segment;
  block.bytes = bytes;
  return blocks_.emplace(address, std::move(block)).first;
}

void* DeviceCache::hand_out(Place place, const Request& request, std::size_t requested) {
  const Pool& pool = *request.pool;
  Block& block = place->second;
  const std::size_t rest = block.bytes - request.bytes;
  if (pool.small || hooks_.expandable() ? rest >= kUnit : rest > kLargestSmallRequest) {
    enter(cut(place, request.bytes));
  }
  block.state = State::kAllocated;
  block.requested = requested;
  block.number = ++allocations_;
  add(stats_.allocations, pool, 1);
  add(stats_.allocated_bytes, pool, block.bytes);
  add(stats_.active_blocks, pool, 1);
  add(stats_.active_bytes, pool, block.bytes);
  add(stats_.requested_bytes, pool, requested);
  name_memory(place->first, block.bytes,
              "allocation " + std::to_string(block.number) + " of " + std::to_string(requested) + " bytes");
  return place->first;
}

/// The beginning and the figures are torch's, which programs read.
std::string DeviceCache::exhausted(std::size_t bytes) const {
  std::size_t free = 0;
  std::size_t total = 0;
  runtime::check(cudaMemGetInfo(&free, &total));
  const auto allocated = static_cast<std::size_t>(stats_.allocated_bytes[0].current);
  const auto reserved = static_cast<std::size_t>(stats_.reserved_bytes[0].current);
  return "CUDA out of memory. Tried to allocate " + shown(segment_bytes(bytes)) + ". GPU " + std::to_string(device_) +
         " has a total capacity of " + shown(total) + " of which " + shown(free) + " is free. " +
         (allowed_ ? shown(*allowed_) + " allowed; " : "") + "Of the allocated memory " + shown(allocated) +
         " is allocated by PyTorch, and " + shown(reserved - allocated) +
         " is reserved by PyTorch but unallocated. (This is the emulated allocator.)";
}

// ---- the end of an allocation ---------------------------------------------------------------------------------------

void DeviceCache::free(void* pointer) {
  const std::lock_guard lock(mutex_);
  const Place place = allocation_at(pointer);
  Block& block = place->second;
  block.state = State::kWaiting;
  remove(stats_.allocations, *block.segment->pool, 1);
  remove(stats_.allocated_bytes, *block.segment->pool, block.bytes);
  const std::set<StreamUse> uses = std::exchange(block.uses, {});
  for (const StreamUse& use : uses) {
    auto event = std::make_unique<runtime::StreamEvent>(use.device, use.stream);
    ++block.events;
    waiting_[use].push_back({std::move(event), place});
  }
  if (block.events == 0) {
    recycle(place);
  }
}

void DeviceCache::record_stream(void* pointer, int device, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  Block& block = allocation_at(pointer)->second;
  if (stream != block.segment->pool->stream) {
    block.uses.insert({device, stream});
  }
}

/// Gives back blocks whose streams have done their work, or all that wait for streams.
void DeviceCache::collect(bool wait) {
  for (auto stream = waiting_.begin(); stream != waiting_.end();) {
    auto& queue = stream->second;
    while (!queue.empty()) {
      if (wait) {
        queue.front().event->wait();
      } else if (!queue.front().event->is_done()) {
        break;
      }
      const Place place = queue.front().place;
      queue.pop_front();
      if (--place->second.events == 0) {
        recycle(place);
      }
    }
    stream = queue.empty() ? waiting_.erase(stream) : std::next(stream);
  }
}

/// Makes a block free that no stream uses.
void DeviceCache::recycle(Place place) {
  poison(place);
  Block& block = place->second;
  const Pool& pool = *block.segment->pool;
  remove(stats_.active_blocks, pool, 1);
  remove(stats_.active_bytes, pool, block.bytes);
  remove(stats_.requested_bytes, pool, block.requested);
  block.requested = 0;
  block.state = State::kFree;
  enter(join(place));
}

/// The real allocator asks nothing of the device here, so a device that has failed is no error.
void DeviceCache::poison(Place place) const noexcept {
  if (clock_runs()) {  // memory has no bytes, and the real allocator takes no time
    return;
  }
  const Block& block = place->second;
  name_memory(place->first, block.bytes, "free memory, before that allocation " + std::to_string(block.number));
  const runtime::OnDevice device(device_);
  if (cudaMemsetAsync(place->first, kPoison, block.bytes, block.segment->pool->stream) != cudaSuccess) {
    runtime::forget_error();
  }
}

void DeviceCache::release_cached() {
  const std::lock_guard lock(mutex_);
  release_all();
}

void DeviceCache::release_all() {
  ++stats_.waits;
  collect(/*wait=*/true);
  for (auto& [key, pool] : pools_) {
    const auto free = pool.free;  // a copy: the loop changes it
    for (const auto& [bytes, address] : free) {
      const Place place = blocks_.find(address);
      if (place->second.segment->expandable) {
        unmap(place);
      } else if (bytes == place->second.segment->bytes) {
        release_segment(place);
      }
    }
  }
}

/// A failed device still ends what it was told to give back, so the segment is gone whatever the call returns.
void DeviceCache::release_segment(Place place) {
  std::byte* const address = place->first;
  const Block& block = place->second;
  ++stats_.device_frees;
  remove(stats_.segments, *block.segment->pool, 1);
  remove(stats_.reserved_bytes, *block.segment->pool, block.bytes);
  take_out(place);
  blocks_.erase(place);
  segments_.erase(address);
  runtime::check(cudaFree(address));
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

DeviceCache::Place DeviceCache::allocation_at(void* pointer) {
  const Place place = blocks_.find(static_cast<std::byte*>(pointer));
  if (place == blocks_.end() || place->second.state != State::kAllocated) {
    throw std::invalid_argument("not the address of an allocation");
  }
  return place;
}

DeviceCache::Pool& DeviceCache::pool_of(std::size_t bytes, cudaStream_t stream) {
  Pool& pool = pools_[{stream, is_small(bytes)}];
  pool.stream = stream;
  pool.small = is_small(bytes);
  return pool;
}

void DeviceCache::enter(Place place) {
  Pool& pool = *place->second.segment->pool;
  if (place->second.state == State::kFree) {
    pool.free.emplace(place->second.bytes, place->first);
  } else {
    pool.unmapped.insert(place->first);
  }
}

void DeviceCache::take_out(Place place) {
  Pool& pool = *place->second.segment->pool;
  if (place->second.state == State::kFree) {
    pool.free.erase({place->second.bytes, place->first});
  } else {
    pool.unmapped.erase(place->first);
  }
}

DeviceCache::Place DeviceCache::cut(Place place, std::size_t bytes) {
  Block rest;
  rest.segment = place->second.segment;
  rest.bytes = place->second.bytes - bytes;
  rest.state = place->second.state;
  place->second.bytes = bytes;
  return blocks_.emplace(place->first + bytes, std::move(rest)).first;
}

DeviceCache::Place DeviceCache::join(Place place) {
  const State state = place->second.state;
  const Place next = std::next(place);
  if (same_segment(place, next) && next->second.state == state) {
    take_out(next);
    place->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (place == blocks_.begin()) {
    return place;
  }
  const Place before = std::prev(place);
  if (same_segment(before, place) && before->second.state == state) {
    take_out(before);
    before->second.bytes += place->second.bytes;
    blocks_.erase(place);
    return before;
  }
  return place;
}

bool DeviceCache::same_segment(Place place, Place other) const {
  return other != blocks_.end() && place->second.segment == other->second.segment;
}

// ---- expandable segments --------------------------------------------------------------------------------------------

std::size_t DeviceCache::room_to_grow(Place place) const {
  const Place next = std::next(place);
  const bool grows = same_segment(place, next) && next->second.state == State::kUnmapped;
  return place->second.bytes + (grows ? next->second.bytes : 0);
}

/// A block of at least the request's bytes, in no pool, made by mapping pages after or between free blocks.
DeviceCache::Place DeviceCache::grow(const Request& request) {
  Place place = growable(request);
  if (place->second.state == State::kUnmapped) {
    place = map(place, std::min(place->second.bytes, request.bytes));
  }
  while (place != blocks_.end() && place->second.bytes < request.bytes) {
    const Place next = std::next(place);
    place = map(next, std::min(next->second.bytes, request.bytes - place->second.bytes));
  }
  if (place != blocks_.end()) {
    take_out(place);
  }
  return place;
}

/// The first block of the lowest run of free and unmapped bytes that holds the request; at worst of a new segment.
DeviceCache::Place DeviceCache::growable(const Request& request) {
  const auto usable = [](const Block& block) { return block.state == State::kFree || block.state == State::kUnmapped; };
  Pool& pool = *request.pool;
  for (std::byte* const address : pool.unmapped) {
    Place place = blocks_.find(address);
    if (place != blocks_.begin() && same_segment(std::prev(place), place) && usable(std::prev(place)->second)) {
      --place;
    }
    std::size_t room = 0;
    for (Place at = place; same_segment(place, at) && usable(at->second) && room < request.bytes; ++at) {
      room += at->second.bytes;
    }
    if (room >= request.bytes) {
      return place;
    }
  }
  const std::size_t total = runtime::total_bytes();
  const std::size_t bytes = rounded_up(total + total / 8, page_bytes(pool.small));
  void* addresses = nullptr;
  runtime::check(reserve_addresses(&addresses, bytes, device_));
  auto* const address = static_cast<std::byte*>(addresses);
  Segment& segment = segments_[address];
  segment = {.address = address, .bytes = bytes, .pool = &pool, .expandable = true};
  Block block;
  block.segment = &segment;
  block.bytes = bytes;
  block.state = State::kUnmapped;
  const Place place = blocks_.emplace(address, std::move(block)).first;
  enter(place);
  return place;
}

/// Puts memory behind the first pages of an unmapped block. Returns the free block that they are part of now, or none.
DeviceCache::Place DeviceCache::map(Place place, std::size_t bytes) {
  Block& block = place->second;
  const Pool& pool = *block.segment->pool;
  const std::size_t size = rounded_up(bytes, page_bytes(pool.small));
  if (!runtime::granted(map_memory(place->first, size, device_))) {
    return blocks_.end();
  }
  ++stats_.device_allocations;
  add(stats_.reserved_bytes, pool, size);
  take_out(place);
  if (size < block.bytes) {
    enter(cut(place, size));
  }
  block.state = State::kFree;
  const Place whole = join(place);
  enter(whole);
  return whole;
}

/// Takes the memory from behind the whole pages of a free block, and returns a segment that has none left.
void DeviceCache::unmap(Place place) {
  const Segment segment = *place->second.segment;
  const std::size_t page = page_bytes(segment.pool->small);
  const auto begin = static_cast<std::size_t>(place->first - segment.address);
  const std::size_t end = begin + place->second.bytes;
  const std::size_t first = rounded_up(begin, page);
  const std::size_t last = end / page * page;
  if (first >= last) {
    return;
  }
  ++stats_.device_frees;
  remove(stats_.reserved_bytes, *segment.pool, last - first);
  take_out(place);
  if (first > begin) {
    const Place rest = cut(place, first - begin);
    enter(place);
    place = rest;
  }
  if (last < end) {
    enter(cut(place, last - first));
  }
  place->second.state = State::kUnmapped;
  place = join(place);
  const bool whole = place->second.bytes == segment.bytes;
  if (whole) {
    blocks_.erase(place);
    segments_.erase(segment.address);
  } else {
    enter(place);
  }
  const cudaError_t status = unmap_memory(segment.address + first, last - first, device_);
  const cudaError_t end_of_segment = whole ? free_addresses(segment.address, segment.bytes, device_) : cudaSuccess;
  runtime::check(status);
  runtime::check(end_of_segment);
}

// ---- limits and figures ---------------------------------------------------------------------------------------------

double DeviceCache::memory_fraction() const {
  const std::lock_guard lock(mutex_);
  const runtime::OnDevice device(device_);
  return allowed_ ? static_cast<double>(*allowed_) / static_cast<double>(runtime::total_bytes()) : 1.0;
}

void DeviceCache::set_memory_fraction(double fraction) {
  const std::lock_guard lock(mutex_);
  const runtime::OnDevice device(device_);
  allowed_ = static_cast<std::size_t>(fraction * static_cast<double>(runtime::total_bytes()));
}

void DeviceCache::add(CacheCounters& counters, const Pool& pool, std::size_t amount) {
  change(counters, pool.small, [amount](CacheCounter& counter) {
    counter.current += static_cast<std::int64_t>(amount);
    counter.added += static_cast<std::int64_t>(amount);
    counter.peak = std::max(counter.peak, counter.current);
  });
}

void DeviceCache::remove(CacheCounters& counters, const Pool& pool, std::size_t amount) {
  change(counters, pool.small, [amount](CacheCounter& counter) {
    counter.current -= static_cast<std::int64_t>(amount);
    counter.removed += static_cast<std::int64_t>(amount);
  });
}

CacheStats DeviceCache::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void DeviceCache::reset_peaks() {
  const std::lock_guard lock(mutex_);
  for_all_counters(stats_, [](CacheCounter& counter) { counter.peak = counter.current; });
}

void DeviceCache::reset_totals() {
  const std::lock_guard lock(mutex_);
  for_all_counters(stats_, [](CacheCounter& counter) { counter.added = counter.removed = 0; });
  stats_.retries = stats_.failures = stats_.waits = stats_.device_allocations = stats_.device_frees = 0;
}

std::size_t DeviceCache::largest_free() const {
  const std::lock_guard lock(mutex_);
  std::size_t largest = 0;
  for (const auto& [key, pool] : pools_) {
    largest = pool.free.empty() ? largest : std::max(largest, pool.free.rbegin()->first);
  }
  return largest;
}

std::vector<CacheSegment> DeviceCache::snapshot() const {
  const std::lock_guard lock(mutex_);
  std::vector<CacheSegment> segments;
  const Segment* continued = nullptr;
  for (const auto& [address, block] : blocks_) {
    if (block.state == State::kUnmapped) {
      continued = nullptr;
      continue;
    }
    if (block.segment != continued) {
      const Pool& pool = *block.segment->pool;
      segments.push_back(
          {.stream = pool.stream, .small = pool.small, .expandable = block.segment->expandable, .blocks = {}});
      continued = block.segment;
    }
    segments.back().blocks.push_back({.address = address,
                                      .bytes = block.bytes,
                                      .requested = block.requested,
                                      .allocated = block.state == State::kAllocated,
                                      .active = block.state != State::kFree});
  }
  return segments;
}

}  // namespace emulated_cuda
