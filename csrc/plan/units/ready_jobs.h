// The jobs with an eligible unit that no device has been promised, in the order of a policy.
//
// insert() and take() are O(log n) for n jobs. Equal seeds draw equal numbers. Threads: one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace hydra {

/// Which job's unit runs next.
enum class UnitPolicy {
  kLongest,          // the job with the largest remaining time: Hydra's Sharded-LRTF
  kLongestResident,  // the same, but a device stays with its resident shard where that lengthens nothing
  kRoundRobin,       // the job that has waited for the most turns
  kRandom,           // any one that is eligible
  kShortest,         // the job with the smallest remaining time
};

struct ReadyJob {
  double rank = 0;  // smaller ones come first; not read for kRandom
  std::size_t job = 0;

  bool operator<(const ReadyJob& other) const { return rank < other.rank || (rank == other.rank && job < other.job); }
};

class ReadyJobs {
 public:
  ReadyJobs(UnitPolicy policy, std::uint64_t seed) : is_random_(policy == UnitPolicy::kRandom), random_(seed) {}

  bool empty() const { return jobs_.empty(); }
  void insert(ReadyJob entry);

  /// The first job, which stays. There has to be one, and an order.
  const ReadyJob& first() const { return jobs_.front(); }

  /// Removes the first job, or a random one. There has to be one.
  ReadyJob take();

  /// Whether a job that is not among these comes before all of them.
  bool is_first(const ReadyJob& other);

 private:
  std::size_t draw(std::size_t count);

  bool is_random_;
  std::mt19937_64 random_;
  std::vector<ReadyJob> jobs_;  // a heap, unless random
};

}  // namespace hydra
