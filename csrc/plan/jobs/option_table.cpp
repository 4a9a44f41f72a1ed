#include "csrc/plan/jobs/option_table.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace hydra {

OptionTable::OptionTable(const JobBatch& batch) : nodes_(batch.nodes) {
  check_batch(batch);
  largest_node_ = *std::max_element(nodes_.begin(), nodes_.end());
  gpus_ = std::accumulate(nodes_.begin(), nodes_.end(), 0);
  for (const TrainingJob& job : batch.jobs) {
    std::vector<UsefulOption> all;
    for (std::size_t place = 0; place < job.options.size(); ++place) {
      all.push_back({job.options[place].gpus, job.options[place].seconds, place});
    }
    std::sort(all.begin(), all.end(), [](const UsefulOption& a, const UsefulOption& b) {
      return std::tie(a.gpus, a.seconds, a.place) < std::tie(b.gpus, b.seconds, b.place);
    });
    std::vector<UsefulOption>& useful = options_.emplace_back();
    for (const UsefulOption& option : all) {
      if (option.gpus <= largest_node_ && (useful.empty() || option.seconds < useful.back().seconds)) {
        useful.push_back(option);
      }
    }
  }
}

std::size_t OptionTable::fitting(std::size_t job, int gpus) const {
  const std::vector<UsefulOption>& options = options_[job];
  std::size_t count = 0;
  while (count < options.size() && options[count].gpus <= gpus) {
    ++count;
  }
  return count;
}

double OptionTable::longest_job() const {
  double longest = 0;
  for (const std::vector<UsefulOption>& options : options_) {
    longest = std::max(longest, options.back().seconds);
  }
  return longest;
}

}  // namespace hydra
