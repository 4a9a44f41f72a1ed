#include "emulator/torch/result_shapes.h"

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace emulated_cuda {

namespace {

struct Seen {
  std::shared_mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const CallShapes>> by_key;
};

Seen& seen() {
  static Seen instance;
  return instance;
}

std::atomic<std::int64_t> behind{0};
std::atomic<std::int64_t> waited_for{0};

}  // namespace

TensorShape TensorShape::of(const at::Tensor& tensor, Kind kind) {
  TensorShape shape;
  if (!tensor.defined()) {
    return shape;
  }
  shape.kind = kind;
  shape.sizes = tensor.sizes();
  shape.strides = tensor.strides();
  shape.offset = kind == Kind::kAlias ? tensor.storage_offset() : 0;
  shape.dtype = tensor.scalar_type();
  return shape;
}

bool TensorShape::fits(const at::Tensor& tensor) const {
  return tensor.defined() == (kind != Kind::kUndefined) &&
         (!tensor.defined() || (tensor.sizes() == at::IntArrayRef(sizes) &&
                                tensor.strides() == at::IntArrayRef(strides) && tensor.scalar_type() == dtype));
}

std::shared_ptr<const CallShapes> find_shapes(const std::string& key) {
  Seen& all = seen();
  const std::shared_lock lock(all.mutex);
  const auto known = all.by_key.find(key);
  return known == all.by_key.end() ? nullptr : known->second;
}

void remember_shapes(const std::string& key, CallShapes shapes) {
  Seen& all = seen();
  const std::unique_lock lock(all.mutex);
  all.by_key.insert_or_assign(key, std::make_shared<const CallShapes>(std::move(shapes)));
}

CallCounts call_counts() noexcept { return {behind.load(), waited_for.load()}; }

void count_call(bool waited) noexcept { ++(waited ? waited_for : behind); }

}  // namespace emulated_cuda
