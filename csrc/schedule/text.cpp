#include "csrc/schedule/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "csrc/base/errors.h"

namespace hydra::schedule {

namespace {

constexpr std::string_view kName = "hydra-schedule";
constexpr std::string_view kFormat = "1";
constexpr std::string_view kBlanks = " \t\r";
constexpr std::string_view kExample = "hydra-schedule 1 stages=4 ranks=4 microbatches=8 versions=delay-1";
constexpr std::array kLetters = {ActionKind::kSendActivation, ActionKind::kReceiveActivation,
                                 ActionKind::kSendGradient,   ActionKind::kReceiveGradient,
                                 ActionKind::kBeginUpdate,  // before B, with which BU begins
                                 ActionKind::kForward,        ActionKind::kBackward,
                                 ActionKind::kReduce,         ActionKind::kFinishUpdate};

[[noreturn]] void fail(int line, std::string_view word, const std::string& problem) {
  const std::string at = word.empty() ? "" : ", '" + std::string(word) + "'";
  throw InvalidSchedule("line " + std::to_string(line) + at + ": " + problem);
}

/// The words of one line, without its comment.
std::vector<std::string_view> words_of(std::string_view line) {
  line = line.substr(0, line.find('#'));
  std::vector<std::string_view> words;
  for (std::size_t begin = line.find_first_not_of(kBlanks); begin != line.npos;) {
    const std::size_t end = std::min(line.find_first_of(kBlanks, begin), line.size());
    words.push_back(line.substr(begin, end - begin));
    begin = line.find_first_not_of(kBlanks, end);
  }
  return words;
}

/// Removes `prefix` from the front of `text`; false if it is not there.
bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) {
    return false;
  }
  text.remove_prefix(prefix.size());
  return true;
}

/// Removes a number without a sign from the front; nullopt if there is none, or it does not fit an int.
std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || text.front() == '-' || error != std::errc()) {
    return std::nullopt;
  }
  text.remove_prefix(index(end - text.data()));
  return number;
}

std::optional<int> number_of(std::string_view text) {
  const std::optional<int> number = take_number(text);
  return text.empty() ? number : std::nullopt;
}

std::optional<Action> action_of(std::string_view word) {
  const auto* kind = std::ranges::find_if(kLetters, [&](ActionKind known) { return take(word, letters(known)); });
  if (kind == kLetters.end()) {
    return std::nullopt;
  }
  Action action{.kind = *kind};
  const std::optional<int> stage = take_number(word);
  const bool named = is_of_batch(*kind) || take(word, ".");
  const std::optional<int> microbatch = is_of_batch(*kind) ? 0 : take_number(word);
  const std::optional<int> before = take(word, "-") ? take_number(word) : 0;
  if (!stage || !named || !microbatch || !before || !word.empty()) {
    return std::nullopt;
  }
  action.stage = *stage;
  action.microbatch = *microbatch;
  action.batch = -*before;
  return action;
}

class Parser {
 public:
  Schedule parse(std::string_view text) {
    int line = 0;
    while (!text.empty()) {
      const std::size_t end = text.find('\n');
      const auto words = words_of(text.substr(0, end));
      text.remove_prefix(end == text.npos ? text.size() : end + 1);
      ++line;
      if (!words.empty()) {
        stages_ == 0 ? read_header(line, words) : read_rank(line, words);
      }
    }
    HYDRA_EXPECT(stages_ > 0, InvalidSchedule, "the text is empty; begin it with a line such as " + quoted(kExample));
    const auto missing = std::ranges::find(lines_, 0);
    HYDRA_EXPECT(missing == lines_.end(), InvalidSchedule,
                 "there is no line for rank " + std::to_string(missing - lines_.begin()) + "; each of the " +
                     std::to_string(lines_.size()) + " ranks needs one");
    return Schedule(stages_, microbatches_, rule_, std::move(bodies_));
  }

 private:
  static std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

  void read_header(int line, const std::vector<std::string_view>& words) {
    if (words[0] != kName) {
      fail(line, words[0], "a schedule begins with a line such as " + quoted(kExample));
    }
    if (words.size() < 2 || words[1] != kFormat) {
      fail(line, words.size() < 2 ? "" : words[1], "only format 1 is supported");
    }
    int ranks = 0;
    bool ruled = false;
    for (std::size_t at = 2; at < words.size(); ++at) {
      const std::size_t equals = std::min(words[at].find('='), words[at].size() - 1);
      const std::string_view field = words[at].substr(0, equals + 1);
      const std::string_view value = words[at].substr(equals + 1);
      if (field == "stages=" && stages_ == 0) {
        stages_ = count(line, words[at], value, kMostStages);
      } else if (field == "ranks=" && ranks == 0) {
        ranks = count(line, words[at], value, kMostStages);
      } else if (field == "microbatches=" && microbatches_ == 0) {
        microbatches_ = count(line, words[at], value, kMostMicrobatches);
      } else if (field == "versions=" && !ruled) {
        rule_ = rule(line, words[at], value);
        ruled = true;
      } else {
        fail(line, words[at], "stages=, ranks=, microbatches= and versions= are expected, each once");
      }
    }
    if (stages_ == 0 || ranks == 0 || microbatches_ == 0 || !ruled) {
      fail(line, "", "stages=, ranks=, microbatches= and versions= are all needed, as in " + quoted(kExample));
    }
    bodies_.resize(index(ranks));
    lines_.resize(index(ranks), 0);
    homes_.resize(index(stages_), kNowhere);
  }

  static int count(int line, std::string_view word, std::string_view value, int most) {
    const std::optional<int> number = number_of(value);
    if (!number || *number < 1 || *number > most) {
      fail(line, word, "a number from 1 to " + std::to_string(most) + " is expected");
    }
    return *number;
  }

  static VersionRule rule(int line, std::string_view word, std::string_view value) {
    const std::optional<VersionRule> rule = rule_named(value);
    if (!rule) {
      fail(line, word, "flush, delay-1, stashing or vertical-sync is expected");
    }
    return *rule;
  }

  void read_rank(int line, const std::vector<std::string_view>& words) {
    const bool begun = words.size() >= 2 && words[0] == "rank" && words[1].ends_with(':');
    const std::optional<int> rank = begun ? number_of(words[1].substr(0, words[1].size() - 1)) : std::nullopt;
    if (!rank) {
      fail(line, words[0], "'rank N:' is expected, then the actions of rank N");
    }
    if (index(*rank) >= lines_.size()) {
      fail(line, words[1], "the header has ranks 0 to " + std::to_string(lines_.size() - 1));
    }
    if (lines_[index(*rank)] != 0) {
      fail(line, words[1], "the rank has line " + std::to_string(lines_[index(*rank)]) + " already");
    }
    lines_[index(*rank)] = line;
    for (std::size_t at = 2; at < words.size(); ++at) {
      bodies_[index(*rank)].push_back(read_action(line, *rank, words[at]));
    }
  }

  Action read_action(int line, int rank, std::string_view word) {
    const std::optional<Action> action = action_of(word);
    if (!action) {
      fail(line, word,
           "an action is such as F0.3, B0.3-1, SF0.3, R0 or U0-2: letters, stage, microbatch, batches before");
    }
    if (const auto problem = problem_of(*action, stages_, microbatches_)) {
      fail(line, word, *problem);
    }
    int& home = homes_[index(action->stage)];
    if (home != kNowhere && home != rank) {
      fail(line, word, "stage " + std::to_string(action->stage) + " is on rank " + std::to_string(home) + " already");
    }
    home = rank;
    return *action;
  }

  static constexpr int kNowhere = -1;

  int stages_ = 0;
  int microbatches_ = 0;
  VersionRule rule_ = VersionRule::kFlush;
  std::vector<Actions> bodies_;
  std::vector<int> lines_;  // by rank: the number of its line; 0 while it has none
  std::vector<int> homes_;  // by stage: the rank that names it
};

}  // namespace

std::string body_token(const Action& action) {
  return token(action) + (action.batch < 0 ? std::to_string(action.batch) : "");
}

std::string text(const Schedule& schedule) {
  std::string lines = std::string(kName) + " " + std::string(kFormat) + " stages=" + std::to_string(schedule.stages()) +
                      " ranks=" + std::to_string(schedule.ranks()) +
                      " microbatches=" + std::to_string(schedule.microbatches()) +
                      " versions=" + name(schedule.rule()) + "\n";
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    lines += "rank " + std::to_string(rank) + ":";
    for (const Action& action : schedule.body(rank)) {
      lines += ' ';
      lines += body_token(action);
    }
    lines += '\n';
  }
  return lines;
}

Schedule parse(std::string_view text) { return Parser().parse(text); }

}  // namespace hydra::schedule
