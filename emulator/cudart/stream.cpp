#include "emulator/cudart/stream.h"

#include <signal.h>

#include <algorithm>
#include <utility>

#include "emulator/cudart/memory_guard.h"
#include "emulator/cudart/virtual_clock.h"

namespace emulated_cuda::cudart {

namespace {

thread_local bool t_in_stream = false;

/// One operation in this many is delayed.
constexpr std::uint64_t kDelayedOneIn = 8;

/// Blocks signals while a thread is started, which inherits the mask. Faults cannot be blocked: they would kill the
/// process without the handler that explains them.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t blocked;
    ::sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) {
      ::sigdelset(&blocked, fault);
    }
    ::pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

bool in_stream_thread() noexcept { return t_in_stream; }

// ---- points and events ----------------------------------------------------------------------------------------------

void Point::reach() noexcept {
  const std::lock_guard lock(mutex_);
  if (!reached_) {
    reached_ = true;
    time_ = Clock::now();
  }
  changed_.notify_all();
}

void Point::reach_at(Clock::time_point time, Unit unit) noexcept {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  in_time_ = true;
  unit_ = unit;
  time_ = time;
}

Unit Point::unit() const noexcept {
  const std::lock_guard lock(mutex_);
  return unit_;
}

bool Point::reached() const noexcept {
  const std::lock_guard lock(mutex_);
  return in_time_ && VirtualClock::get().runs() ? VirtualClock::get().now() >= time_ : reached_;
}

Clock::time_point Point::time() const noexcept {
  const std::lock_guard lock(mutex_);
  return time_;
}

void Point::wait() const noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
  const bool in_time = in_time_;
  lock.unlock();
  if (in_time) {  // a point does not change any more
    VirtualClock::get().wait_until(time_, unit_);
  }
}

void Point::wait(const Fault& fault) const noexcept {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, &fault] { return reached_ || fault != cudaSuccess; });
}

void Point::wake() noexcept {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

PointPtr Event::latest() const {
  const std::lock_guard lock(mutex_);
  return latest_;
}

void Event::set_latest(PointPtr point) {
  const std::lock_guard lock(mutex_);
  latest_ = std::move(point);
}

// ---- delays ---------------------------------------------------------------------------------------------------------

void Delays::set(double longest_seconds, std::uint64_t seed, int number) {
  longest_seconds_ = longest_seconds;
  std::seed_seq words{seed & 0xffffffffU, seed >> 32U, static_cast<std::uint64_t>(number)};
  random_.seed(words);
}

Clock::duration Delays::next() {
  if (longest_seconds_ <= 0.0 || random_() % kDelayedOneIn != 0) {
    return {};
  }
  std::uniform_real_distribution<double> seconds(0.0, longest_seconds_);
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds(random_)));
}

// ---- what operations take -------------------------------------------------------------------------------------------

Task Task::of(const KernelWork& work) {
  const Speeds& speeds = VirtualClock::get().speeds();
  const double computing = work.half_flops / speeds.half_flops + work.full_flops / speeds.full_flops;
  const double moving = work.bytes / speeds.device_memory;
  return {.unit = Unit::kProcessors, .seconds = std::max({computing, moving, speeds.operation_seconds})};
}

// ---- streams --------------------------------------------------------------------------------------------------------

Stream::Stream(int device, int number, int priority, const Fault& fault)
    : device_(device), number_(number), priority_(priority), fault_(fault) {
  const BlockedSignals blocked;
  thread_ = std::thread([this] { run(); });
}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_one();
  thread_.join();
}

void Stream::set_delays(double longest_seconds, std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  delays_.set(longest_seconds, seed, number_);
}

PointPtr Stream::push(Work work, const Task& task) {
  return VirtualClock::get().runs() ? enqueue_in_time(task) : enqueue(std::move(work), /*delayed=*/true);
}

PointPtr Stream::mark() { return push({}); }

void Stream::follow(PointPtr point) {
  if (VirtualClock::get().runs()) {
    const std::lock_guard lock(mutex_);
    if (point->time() > free_) {
      free_ = point->time();
      held_by_ = point->unit();
    }
    return;
  }
  push([this, point = std::move(point)] {
    {
      const std::lock_guard lock(mutex_);
      followed_ = point;
    }
    point->wait(fault_);
    const std::lock_guard lock(mutex_);
    followed_ = nullptr;
  });
}

void Stream::wait() { (VirtualClock::get().runs() ? enqueue_in_time({}) : enqueue({}, /*delayed=*/false))->wait(); }

bool Stream::idle() const {
  const std::lock_guard lock(mutex_);
  if (VirtualClock::get().runs()) {
    return VirtualClock::get().now() >= free_;
  }
  return unfinished_ == 0;
}

void Stream::drain() const {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return unfinished_ == 0; });
}

void Stream::drop() noexcept {
  std::deque<Operation> dropped;
  PointPtr followed;
  {
    const std::lock_guard lock(mutex_);
    dropped.swap(queue_);
    followed = followed_;
  }
  if (followed) {
    followed->wake();
  }
  for (Operation& operation : dropped) {
    operation.work = nullptr;
    finish(operation);
  }
}

PointPtr Stream::enqueue(Work work, bool delayed) {
  Operation operation{.work = std::move(work), .point = std::make_shared<Point>()};
  PointPtr point = operation.point;
  {
    const std::lock_guard lock(mutex_);
    if (fault_ != cudaSuccess) {
      point->reach();
      return point;
    }
    operation.delay = delayed ? delays_.next() : Clock::duration{};
    queue_.push_back(std::move(operation));
    ++unfinished_;
  }
  work_.notify_one();
  return point;
}

PointPtr Stream::enqueue_in_time(const Task& task) {
  auto point = std::make_shared<Point>();
  VirtualClock& clock = VirtualClock::get();
  const std::lock_guard lock(mutex_);
  if (fault_ != cudaSuccess) {
    point->reach();
    return point;
  }
  const Busy busy = clock.run(task.unit, {.enqueued = clock.now(), .stream = free_, .held_by = held_by_}, task.seconds);
  if (task.unit != Unit::kNone) {
    free_ = busy.end;
    held_by_ = task.unit;
  }
  point->reach_at(busy.end, held_by_);
  return point;
}

void Stream::run() noexcept {
  t_in_stream = true;
  hold_key(true);
  for (;;) {
    Operation operation;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) {
        return;
      }
      operation = std::move(queue_.front());
      queue_.pop_front();
    }
    perform(operation);
    finish(operation);
  }
}

void Stream::perform(Operation& operation) {
  if (operation.delay > Clock::duration{} && fault_ == cudaSuccess) {
    std::this_thread::sleep_for(operation.delay);
  }
  if (operation.work && fault_ == cudaSuccess) {
    operation.work();
  }
  // What the operation owns is gone before anything can see that it has ended.
  operation.work = nullptr;
}

void Stream::finish(const Operation& operation) noexcept {
  const std::lock_guard lock(mutex_);
  operation.point->reach();
  --unfinished_;
  ended_.notify_all();
}

}  // namespace emulated_cuda::cudart
