#include "csrc/transfer/ticket.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/cpp/support.h"

namespace hydra {
namespace {

std::exception_ptr failure(const char* message) { return std::make_exception_ptr(std::runtime_error(message)); }

TEST(Ticket, StartsUnfinishedWithItsBytes) {
  const Ticket ticket(123);
  EXPECT_FALSE(ticket.finished());
  EXPECT_EQ(ticket.bytes(), 123);
  EXPECT_EQ(ticket.seconds(), 0.0);
  EXPECT_EQ(ticket.error(), nullptr);
}

TEST(Ticket, CompletesWithItsSeconds) {
  Ticket ticket(1);
  ticket.complete(0.5);
  EXPECT_TRUE(ticket.finished());
  EXPECT_EQ(ticket.seconds(), 0.5);
  EXPECT_NO_THROW(ticket.wait());
}

TEST(Ticket, ThrowsItsErrorAtEveryWaitButNotAtQuietOnes) {
  Ticket ticket(1);
  ticket.fail(failure("broken"));
  EXPECT_TRUE(ticket.finished());
  ticket.wait_quietly();
  ticket.wait_enqueued();
  EXPECT_THROW(ticket.wait(), std::runtime_error);
  EXPECT_THROW(ticket.wait(), std::runtime_error);
  EXPECT_NE(ticket.error(), nullptr);
}

TEST(Ticket, EnqueuedIsNotFinished) {
  Ticket ticket(1);
  ticket.mark_enqueued();
  ticket.wait_enqueued();
  EXPECT_FALSE(ticket.finished());
}

TEST(Ticket, KeepsItsFirstEnd) {
  Ticket done(1);
  done.complete(1.0);
  done.fail(failure("too late"));
  done.mark_enqueued();
  done.complete(2.0);
  EXPECT_TRUE(done.finished());
  EXPECT_EQ(done.seconds(), 1.0);
  EXPECT_NO_THROW(done.wait());
  Ticket failed(1);
  failed.fail(failure("first"));
  failed.complete(1.0);
  EXPECT_THROW(failed.wait(), std::runtime_error);
}

TEST(Ticket, WakesEveryWaiter) {
  Ticket ticket(1);
  std::atomic<int> woken{0};
  std::vector<std::jthread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&] {
      ticket.wait_enqueued();
      ticket.wait();
      woken.fetch_add(1);
    });
  }
  ticket.mark_enqueued();
  ticket.complete(0.0);
  waiters.clear();
  EXPECT_EQ(woken.load(), 4);
}

TEST(Ticket, WaitsLetAnotherRunGoOn) {
  Ticket ticket(1);
  test::expect_pause([&] { ticket.wait_enqueued(); }, [&] { ticket.mark_enqueued(); });
  test::expect_pause([&] { ticket.wait(); }, [&] { ticket.complete(0.0); });
}

}  // namespace
}  // namespace hydra
