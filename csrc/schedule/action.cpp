#include "csrc/schedule/action.h"

namespace hydra::schedule {

const char* letters(ActionKind kind) noexcept {
  switch (kind) {
    case ActionKind::kForward:
      return "F";
    case ActionKind::kBackward:
      return "B";
    case ActionKind::kReduce:
      return "R";
    case ActionKind::kBeginUpdate:
      return "BU";
    case ActionKind::kFinishUpdate:
      return "U";
    case ActionKind::kSendActivation:
      return "SF";
    case ActionKind::kReceiveActivation:
      return "RF";
    case ActionKind::kSendGradient:
      return "SB";
    case ActionKind::kReceiveGradient:
      return "RB";
  }
  return "?";
}

std::string token(const Action& action) {
  std::string text = letters(action.kind);
  text += std::to_string(action.stage);
  if (!is_of_batch(action.kind)) {
    text += '.';
    text += std::to_string(action.microbatch);
  }
  return text;
}

std::string in_words(const Action& action) { return token(action) + " of batch " + std::to_string(action.batch); }

}  // namespace hydra::schedule
