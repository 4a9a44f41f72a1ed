// The pass that adds sends and receives to the computes of a rank.
//
// A send comes right after the compute that makes its value. The receive for a compute comes before the previous
// compute, so that the value travels while that one runs; the receive for the first compute of a list comes first of
// all. Nothing is sent between stages on one rank.
//
// Each direction of each hop is a separate queue, in which sender and receiver name microbatches in the same order.
#pragma once

#include "csrc/schedule/schedule.h"

namespace hydra::schedule {

/// The stage on another rank whose output a forward, or whose input gradient a backward, waits for; kNoStage if nothing
/// has to be received.
int received_from(const Schedule& schedule, const Action& compute);
/// The stage on another rank that needs the result of a forward or backward; kNoStage if nothing has to be sent.
int sent_to(const Schedule& schedule, const Action& compute);
inline constexpr int kNoStage = -1;

/// `actions`: those of one rank, in its order, without communication.
Actions add_communication(const Schedule& schedule, const Actions& actions);

}  // namespace hydra::schedule
