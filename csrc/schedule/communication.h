// The pass that puts sends and receives into what a rank computes.
//
// A send comes right after what makes the value. The receive for a forward or backward comes before the one that
// precedes it, so that the value travels while that one computes; the first of a list is preceded by nothing, its
// receive comes first of all. Between stages on one rank nothing is sent.
//
// Every direction of every hop is a queue of its own: senders and receivers name microbatches in the same order there,
// and no two hops share one.
#pragma once

#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

/// The stage whose output a forward waits for, or whose input gradient a backward waits for, where it is on another
/// rank; kNoStage where nothing has to be received.
int received_from(const Schedule& schedule, const Action& compute);
/// The stage that gets what a forward or backward made, likewise.
int sent_to(const Schedule& schedule, const Action& compute);
inline constexpr int kNoStage = -1;

/// `actions` are those of one rank, in its order, without communication.
Actions add_communication(const Schedule& schedule, const Actions& actions);

}  // namespace hydra::schedule
