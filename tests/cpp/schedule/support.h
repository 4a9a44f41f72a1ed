// Makes schedules for tests, and turns actions and errors into text.
#pragma once

#include <string>
#include <vector>

#include "csrc/schedule/schedule.h"
#include "csrc/schedule/text.h"

namespace hydra::schedule::test {

inline Schedule made(const char* kind, int stages, int ranks, int microbatches) {
  return Schedule::make(Recipe::named(kind, stages, ranks, microbatches, false, 0));
}

/// Returns the actions in the text form of a body.
inline std::string words(const Actions& actions) {
  std::string line;
  for (const Action& action : actions) {
    line += line.empty() ? "" : " ";
    line += body_token(action);
  }
  return line;
}

/// Returns the message of the error that `call` throws, or "" if it does not throw the expected error.
template <typename Error, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace hydra::schedule::test
