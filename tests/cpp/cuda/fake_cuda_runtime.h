// A CUDA runtime made of threads, for machines without a GPU: linked in place of the real one.
//
// A stream is a thread that runs what was enqueued on it, in order, each thing after a random delay; the default
// stream is one more stream that orders nothing else. Device memory is host memory, and a kernel is a function.
// So the code under test runs as it is, and a wait that it forgets shows as wrong bytes or as a data race.
// Only the calls that csrc/transfer makes are here. Threads have a current device and a last error of their own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

namespace fake_cuda {

/// Runs on the stream's thread when its turn comes.
void launch(cudaStream_t stream, std::function<void()> kernel);
/// Longest delay of anything enqueued from here on.
void set_delays(double longest_seconds, std::uint64_t seed);
/// The call of this name fails once, after `successes` more calls.
void fail(const std::string& call, cudaError_t error, int successes = 0);
void set_capturing(cudaStream_t stream, bool capturing);

/// What exists now.
int streams();
int events();
int registrations();
/// Whether any thread used a stream or an event of a device that was not its current one.
bool wrong_device();
/// Back to no delays and no scripted failures.
void reset();

}  // namespace fake_cuda
