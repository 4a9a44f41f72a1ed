// The part of a stash that encodes intervals: when it does, and how long their streams are.
#include <ATen/ops/clone.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/ScopeExit.h>

#include <utility>

#include "csrc/pytorch/stash/stash.h"
#include "csrc/pytorch/threads/gil.h"

namespace hydra {

namespace {

/// The reason why the stream is not used; null if it is.
const char* reason_against(const Encoded& encoded, Bytes bytes) {
  if (!encoded.stream.defined()) {
    return "an index outside its window";
  }
  const bool is_known = !encoded.header.defined();
  return is_known && encoded.length() > bytes / 16 * 15 ? "does not become smaller" : nullptr;
}

}  // namespace

void Stash::decide() {
  for (;;) {
    const auto [interval, is_made, leaves_at_once] = index_->next_to_encode();
    if (!interval) {
      return;
    }
    if (!is_made) {
      encode(interval);
    }
    if (leaves_at_once && (is_made || !interval->making())) {
      begin_leaving(interval);
    } else if (is_made) {
      finish(interval);
    }
  }
}

bool Stash::encode(const StashedIntervalPtr& interval) {
  const std::optional<StashedInterval::Encodable> encodable = interval->begin_encoding(device_);
  if (!encodable) {
    return false;
  }
  Encoded encoded;
  FencePtr made;
  const char* refusal = "it could not be encoded";
  try {
    const c10::OptionalStreamGuard on(interval->saved().stream);
    encoded = encodable->coder->encode(encodable->from, room_);
    made = encoded.header.defined() ? backend_->record() : nullptr;
    refusal = reason_against(encoded, encodable->from.bytes);
  } catch (const c10::OutOfMemoryError&) {
    refusal = "no memory to encode it in";
  } catch (...) {  // re-raised
    interval->refuse_encoding(refusal);
    throw;
  }
  if (refusal != nullptr) {
    interval->refuse_encoding(refusal);
    return false;
  }
  interval->become_stream(encodable->coder, std::move(encoded), std::move(made));
  return true;
}

void Stash::finish(const StashedIntervalPtr& interval) {
  if (!interval->making()) {
    return;
  }
  const auto alone = lock_without_gil(finishing_);
  finisher_ = std::this_thread::get_id();
  const auto finished = c10::make_scope_exit([this] { finisher_ = std::thread::id(); });
  const std::optional<StashedInterval::Making> making = interval->making();
  if (!making) {
    return;
  }
  {
    const ReleaseGilIfHeld released;
    making->made->wait();
  }
  Bytes length = 0;
  at::Tensor exact = making->encoded.stream;
  try {
    length = making->encoded.length();
    const c10::OptionalStreamGuard on(interval->saved().stream);
    exact = exact.narrow(0, 0, length).clone();
  } catch (const c10::OutOfMemoryError&) {  // the stream stays in the memory that it was made in
  } catch (...) {                           // re-raised, once
    interval->end_making(std::nullopt);
    throw;
  }
  interval->end_making(StashedInterval::Stream{exact.storage(), length});
}

}  // namespace hydra
