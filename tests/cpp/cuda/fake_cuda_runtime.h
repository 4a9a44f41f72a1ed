// A CUDA runtime made of threads, for machines without a GPU: linked in place of the real one.
//
// A stream is a thread that runs its work in order, each operation after a random delay. The default stream is one
// more stream, and does not order the others. Device memory is host memory, and a kernel is a function. So the code
// under test runs unchanged, and a missing wait shows as wrong bytes or as a data race.
// It has only the calls that csrc/transfer makes. Each thread has a current device and a last error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

namespace fake_cuda {

/// Enqueues a function, which runs on the stream's thread in its turn.
void launch(cudaStream_t stream, std::function<void()> kernel);
/// Sets the longest delay of later operations.
void set_delays(double longest_seconds, std::uint64_t seed);
/// Makes the call of this name fail once, after `successes` more calls.
void fail(const std::string& call, cudaError_t error, int successes = 0);
void set_capturing(cudaStream_t stream, bool capturing);

/// Counts of objects that exist now.
int streams();
int events();
int registrations();
/// Whether any thread used a stream or an event of a device that was not its current one.
bool wrong_device();
/// Removes all delays and scripted failures.
void reset();

}  // namespace fake_cuda
