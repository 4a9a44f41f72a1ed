// The text form of a schedule, version 1, for reading, writing by hand, comparing and storing.
//
//   hydra-schedule 1 stages=2 ranks=2 microbatches=3 versions=delay-1
//   rank 0: U0-2 F0.0 B0.2-1 R0-1 F0.1 B0.0 F0.2 B0.1   # the rest of a line is a comment
//   rank 1: U1-2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 R1
//
// The first line that is not empty is the header: four fields, each once, in any order. One line for every rank
// follows, in any order. An action is its letters (action.h), the stage and, except for R, BU and U, a point and the
// microbatch. An action of an earlier batch than the step's ends with a minus and how many batches earlier. Numbers are
// decimal. Words are separated by blanks, lines by a line feed (a carriage return before it is a blank).
//
// If the text has no BU, or no sends and receives, streams add them (stream.h).
//
// text(parse(x)) is x except for comments, blanks and the order of fields and ranks; parse(text(s)) is s.
#pragma once

#include <string>
#include <string_view>

#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

std::string text(const Schedule& schedule);

/// "F0.3-1": an action of a body.
std::string body_token(const Action& action);

/// Throws InvalidSchedule, which names line and word.
Schedule parse(std::string_view text);

}  // namespace hydra::schedule
