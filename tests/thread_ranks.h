// Ranks as threads of a test. Their messages go through queues.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "parallel/group.h"

namespace streambp {

class PostOffice {
 public:
  void send(Index from, Index to, const void* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto* begin = static_cast<const std::byte*>(data);
    queues_[{from, to}].emplace_back(begin, begin + bytes);
    arrived_.notify_all();
  }
  void receive(Index from, Index to, void* data, std::size_t bytes) {
    std::unique_lock lock(mutex_);
    auto& queue = queues_[{from, to}];
    arrived_.wait(lock, [&] { return closed_ || !queue.empty(); });
    require(!queue.empty(), "another rank has failed");
    require(queue.front().size() == bytes, "rank ", to, " expects ", bytes, " bytes from ", from, ", which sends ",
            queue.front().size());
    std::memcpy(data, queue.front().data(), bytes);
    queue.pop_front();
  }
  // Wakes the ranks that wait for a rank that has failed.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    arrived_.notify_all();
  }
  bool empty() const {
    for (const auto& [route, queue] : queues_)
      if (!queue.empty()) return false;
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::pair<Index, Index>, std::deque<std::vector<std::byte>>> queues_;
  bool closed_ = false;
};

// The ranks [first, first + size) of the run, seen from one of them.
class ThreadTransport : public Transport {
 public:
  ThreadTransport(PostOffice& post, Index first, Index rank) : post_(post), first_(first), rank_(rank) {}
  void start(const Transfers& transfers) override {
    started_.insert(started_.end(), transfers.sends.begin(), transfers.sends.end());
    awaited_.insert(awaited_.end(), transfers.receives.begin(), transfers.receives.end());
  }
  // Sends what the memory holds now: it must not have changed since start().
  void finish() override {
    for (const Transfer& t : std::exchange(started_, {})) {
      post_.send(rank_, first_ + t.peer, t.data, t.bytes);
      sent += static_cast<double>(t.bytes);
    }
    for (const Transfer& t : awaited_) post_.receive(first_ + t.peer, rank_, t.data, t.bytes);
    awaited_.clear();
  }
  void exchange_on_host(const Transfers& transfers) override {
    const double before = sent;
    start(transfers), finish();
    sent = before;
  }

  double sent = 0;  // bytes between devices

 private:
  std::vector<Transfer> started_, awaited_;
  PostOffice& post_;
  const Index first_, rank_;  // in the run
};

// Calls f(ranks) for every rank of a grid, each in its own thread. Throws what one of them throws.
template <class F>
void as_ranks(Index streams, Index sequence, F&& f) {
  PostOffice of_all, of_neighbours;
  std::exception_ptr error;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (Index rank = 0; rank < streams * sequence; ++rank) {
    threads.emplace_back([&, rank] {
      const Index first = rank / sequence * sequence;
      ThreadTransport all(of_all, 0, rank), neighbours(of_neighbours, first, rank);
      try {
        f(Ranks{{rank, streams * sequence, &all}, {rank - first, sequence, &neighbours}});
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        of_all.close(), of_neighbours.close();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
  require(of_all.empty() && of_neighbours.empty(), "a message was never received");
}

}  // namespace streambp
