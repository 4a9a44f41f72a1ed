// A model of torch's native caching allocator for one device: which bytes an allocation gets, when the device is asked
// for memory, and what happens before an allocation fails. Without torch's types.
//
// A request is rounded up to 512 bytes. Up to 1 MiB it is small and comes from segments of 2 MiB; a larger one comes
// from segments of 20 MiB, or of its own size rounded up to 2 MiB if it has 10 MiB or more. Free bytes belong to one
// stream and one of the two classes, and are given out best fit: the smallest block, then the lowest address. What is
// left of a block is split off from 512 bytes on (small) or above 1 MiB (large). Free neighbours become one block.
//
// A request that finds no free block goes through these, and ends with the first that succeeds:
//   1. `on_miss`, once, with the lock held, and a second search if it returns true;
//   2. new memory of the device, unless the limit on reserved bytes forbids it;
//   3. a wait for all recorded streams, a return of all whole free segments to the device, and step 2 again: a retry;
//   4. CacheExhausted.
//
// A freed block that other streams have used waits for events on them, which each later allocation looks at. A freed
// block is filled with 0xFF, a NaN, in the order of its stream. With expandable segments a stream and class has one
// range of addresses that grows by pages of 2 MiB (small) or 20 MiB (large), and whole free pages go back in step 3.
//
// Not modelled: settings other than expandable segments, private pools of CUDA graphs, traces, counts of inactive
// splits. Owns the device's segments, and returns none of them when it is destroyed: the process ends then.
// Thread-safe: one recursive lock, held during `on_miss`, and while new memory is asked for or waited for. So `on_miss`
// may call this object on its own thread, and must wait for no other thread that may. Sizes are bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "emulator/c10_cuda/runtime_calls.h"

namespace emulated_cuda {

/// The device has too little memory, or the limit on reserved bytes leaves too little.
class CacheExhausted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// How many there are, the most there were, and how many came and went.
struct CacheCounter {
  std::int64_t current = 0;
  std::int64_t peak = 0;
  std::int64_t added = 0;
  std::int64_t removed = 0;
};

/// Of both classes together, of the small ones, of the large ones.
using CacheCounters = std::array<CacheCounter, 3>;

struct CacheStats {
  CacheCounters allocations;
  CacheCounters segments;       // expandable ones are not counted, as torch does
  CacheCounters active_blocks;  // allocated, or freed and waiting for another stream
  CacheCounters allocated_bytes;
  CacheCounters reserved_bytes;
  CacheCounters active_bytes;
  CacheCounters requested_bytes;  // of active blocks, before rounding
  std::int64_t retries = 0;
  std::int64_t failures = 0;
  std::int64_t waits = 0;  // for all recorded streams
  std::int64_t device_allocations = 0;
  std::int64_t device_frees = 0;
};

struct CacheBlock {
  std::byte* address = nullptr;
  std::size_t bytes = 0;
  std::size_t requested = 0;
  bool allocated = false;
  bool active = false;
};

/// A segment, or a run of mapped pages of an expandable one.
struct CacheSegment {
  cudaStream_t stream = nullptr;
  bool small = false;
  bool expandable = false;
  std::vector<CacheBlock> blocks;  // by address; they touch
};

struct CacheHooks {
  /// Frees what it can. Returns whether it freed any.
  std::function<bool()> on_miss;
  /// Whether new segments are expandable.
  std::function<bool()> expandable;
};

class DeviceCache {
 public:
  DeviceCache(int device, CacheHooks hooks);
  DeviceCache(const DeviceCache&) = delete;
  DeviceCache& operator=(const DeviceCache&) = delete;

  /// `bytes` is positive, and the calling thread's current device is this one. Throws CacheExhausted,
  /// runtime::CudaFailure.
  void* allocate(std::size_t bytes, cudaStream_t stream);
  /// Throws std::invalid_argument unless this is an allocation.
  void free(void* pointer);
  /// The allocation is used on a stream of `device`; it is reused only when the work that is there at its end is done.
  void record_stream(void* pointer, int device, cudaStream_t stream);
  /// Waits for recorded streams, and returns all that is free and whole to the device.
  void release_cached();

  /// 1 if none was set.
  double memory_fraction() const;
  /// Limits reserved bytes to this part of the device's memory.
  void set_memory_fraction(double fraction);

  CacheStats stats() const;
  void reset_peaks();
  void reset_totals();
  std::size_t largest_free() const;
  std::vector<CacheSegment> snapshot() const;

 private:
  struct Pool {
    cudaStream_t stream = nullptr;
    bool small = false;
    std::set<std::pair<std::size_t, std::byte*>> free;  // by size, then address
    std::set<std::byte*> unmapped;
  };
  struct Segment {
    std::byte* address = nullptr;
    std::size_t bytes = 0;
    Pool* pool = nullptr;
    bool expandable = false;
  };
  enum class State { kFree, kAllocated, kWaiting, kUnmapped };
  struct StreamUse {
    int device = 0;
    cudaStream_t stream = nullptr;
    auto operator<=>(const StreamUse&) const = default;
  };
  struct Block {
    Segment* segment = nullptr;
    std::size_t bytes = 0;
    State state = State::kFree;
    std::size_t requested = 0;
    std::uint64_t number = 0;  // of the allocation
    std::set<StreamUse> uses;
    int events = 0;
  };
  using Blocks = std::map<std::byte*, Block>;
  using Place = Blocks::iterator;  // the map's end stands for none
  struct Waiting {
    std::unique_ptr<runtime::StreamEvent> event;
    Place place;
  };
  struct Request {
    std::size_t bytes = 0;  // rounded
    Pool* pool = nullptr;
  };

  Place allocation_at(void* pointer);
  Pool& pool_of(std::size_t bytes, cudaStream_t stream);
  void add(CacheCounters& counters, const Pool& pool, std::size_t amount);
  void remove(CacheCounters& counters, const Pool& pool, std::size_t amount);

  Place take_free(const Request& request);
  Place take_new(const Request& request);
  Place new_segment(const Request& request, std::size_t bytes);
  void* hand_out(Place place, const Request& request, std::size_t requested);
  std::string exhausted(std::size_t bytes) const;

  /// Enters a free or unmapped block in its pool, and takes it out.
  void enter(Place place);
  void take_out(Place place);
  /// Cuts a block that is in no pool after `bytes`. Returns the rest, which is in no pool either.
  Place cut(Place place, std::size_t bytes);
  /// Joins a block that is in no pool with its neighbours of the same state. Returns the whole, which is in no pool.
  Place join(Place place);
  /// `other` may be the end.
  bool same_segment(Place place, Place other) const;
  void recycle(Place place);
  void poison(Place place) const noexcept;

  void collect(bool wait);
  void release_all();
  void release_segment(Place place);

  std::size_t room_to_grow(Place place) const;
  Place grow(const Request& request);
  Place growable(const Request& request);
  Place map(Place place, std::size_t bytes);
  void unmap(Place place);

  const int device_;
  const CacheHooks hooks_;
  mutable std::recursive_mutex mutex_;
  std::map<std::pair<cudaStream_t, bool>, Pool> pools_;
  std::map<std::byte*, Segment> segments_;
  Blocks blocks_;
  std::map<StreamUse, std::deque<Waiting>> waiting_;
  std::optional<std::size_t> allowed_;  // reserved bytes
  std::uint64_t allocations_ = 0;
  CacheStats stats_;
};

}  // namespace emulated_cuda
