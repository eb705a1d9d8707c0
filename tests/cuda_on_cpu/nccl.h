// NCCL on the CPU: messages between emulated GPUs, of one process or of several, travel through sockets. What a message
// will overwrite holds 0xff bytes until it arrives.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_runtime.h"

#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_VERSION_CODE 22809

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6
};
enum ncclDataType_t { ncclInt8 = 0, ncclChar = 0 };
struct ncclUniqueId {
  char internal[NCCL_UNIQUE_ID_BYTES];
};

inline const char* ncclGetErrorString(ncclResult_t result) {
  constexpr cuda_on_cpu::Name<ncclResult_t> names[] = {
      {ncclSuccess, "", "no error"},
      {ncclUnhandledCudaError, "", "unhandled cuda error"},
      {ncclSystemError, "", "unhandled system error"},
      {ncclInvalidArgument, "", "invalid argument"},
      {ncclInvalidUsage, "", "invalid usage"},
      {ncclRemoteError, "", "remote process exited or there was a network error"},
      {ncclInternalError, "", "internal error"}};
  return cuda_on_cpu::find_name(names, result).text;
}

// One rank of a communicator: a socket to every other rank.
struct ncclComm {
  int rank = 0;
  std::vector<int> sockets;    // by rank; -1: this rank
  std::vector<void*> buffers;  // by rank; allocated at the first message
  std::atomic<ncclResult_t> error = ncclSuccess;
  std::atomic<int> under_way = 0;  // groups of messages

  ~ncclComm() {
    for (const int socket : sockets)
      if (socket >= 0) close(socket);
    for (void* const buffer : buffers) cuda_on_cpu::device_memory.release(buffer);
  }

  bool has_buffer(int peer) {
    void*& buffer = buffers[static_cast<std::size_t>(peer)];
    if (!buffer) buffer = cuda_on_cpu::device_memory.allocate(std::size_t{1} << 16);
    return buffer != nullptr;
  }
};
using ncclComm_t = ncclComm*;

namespace cuda_on_cpu {

struct Message {
  ncclComm_t comm;
  int peer;
  char* data;
  std::uint64_t bytes;
  bool sends;
  cudaStream_t stream;
};

// One direction of a socket: messages one after another, each with its size before it.
class Line {
 public:
  Line(int socket, bool sends) : socket(socket), sends_(sends) {}
  void add(const Message& m) { left_.push_back(m); }
  bool done() const { return left_.empty(); }

  // Moves what the socket takes or has.
  ncclResult_t move() {
    while (!left_.empty()) {
      const Message& m = left_.front();
      auto* size = reinterpret_cast<char*>(&size_);
      if (moved_ == 0 && sends_) size_ = m.bytes;
      char* data = moved_ < sizeof size_ ? size + moved_ : m.data + (moved_ - sizeof size_);
      const std::size_t count = (moved_ < sizeof size_ ? sizeof size_ : sizeof size_ + m.bytes) - moved_;
      const ssize_t n =
          sends_ ? ::send(socket, data, count, MSG_DONTWAIT | MSG_NOSIGNAL) : ::recv(socket, data, count, MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) return ncclSuccess;
      if (n <= 0) return ncclRemoteError;
      moved_ += static_cast<std::size_t>(n);
      if (moved_ >= sizeof size_ && size_ != m.bytes)
        return ncclInvalidUsage;  // the other rank's message has another size
      if (moved_ == sizeof size_ + m.bytes) left_.pop_front(), moved_ = 0;
    }
    return ncclSuccess;
  }

  const int socket;

 private:
  const bool sends_;
  std::deque<Message> left_;
  std::uint64_t size_ = 0;
  std::size_t moved_ = 0;  // bytes of the first message and of its size
};

inline ncclResult_t deliver(const std::vector<Message>& messages) {
  std::map<std::pair<int, bool>, Line> lines;
  for (const Message& m : messages) {
    const int socket = m.comm->sockets[static_cast<std::size_t>(m.peer)];
    lines.try_emplace({socket, m.sends}, socket, m.sends).first->second.add(m);
  }
  for (;;) {
    std::vector<pollfd> waits;
    for (auto& [key, line] : lines) {
      {
        const DeviceMemory::Access access;
        if (const ncclResult_t result = line.move(); result != ncclSuccess) return result;
      }
      if (!line.done()) waits.push_back({line.socket, static_cast<short>(key.second ? POLLOUT : POLLIN), 0});
    }
    if (waits.empty()) return ncclSuccess;
    poll(waits.data(), waits.size(), 1000);
  }
}

inline thread_local int group_depth = 0;
inline thread_local std::vector<Message> group;

// Messages of a group travel together, after the work that their stream has waited for.
inline ncclResult_t end_group() {
  std::map<cudaStream_t, std::vector<Message>> of_stream;
  for (const Message& m : group) of_stream[m.stream].push_back(m);
  group.clear();
  for (const auto& [stream, messages] : of_stream) {
    if (stream->host_work != host_work)
      throw std::logic_error("CUDA on CPU: a stream sends messages, but has not waited for the work launched before");
    {
      const DeviceMemory::Access access;
      for (const Message& m : messages)
        if (!m.sends) std::memset(m.data, 0xff, m.bytes);
    }
    ncclComm& comm = *messages[0].comm;
    ++comm.under_way;
    stream->later([&comm, messages = messages] {
      if (const ncclResult_t result = deliver(messages); result != ncclSuccess) comm.error = result;
      --comm.under_way;
    });
  }
  return ncclSuccess;
}

inline ncclResult_t add_to_group(const Message& m) {
  const bool valid = m.peer >= 0 && m.peer < static_cast<int>(m.comm->sockets.size()) && m.peer != m.comm->rank;
  if (!valid || !device_memory.holds(m.data, m.bytes)) return ncclInvalidArgument;
  if (m.comm->error != ncclSuccess) return m.comm->error;
  if (!m.comm->has_buffer(m.peer)) return ncclUnhandledCudaError;
  group.push_back(m);
  return group_depth > 0 ? ncclSuccess : end_group();
}

// The address of a rank: a name that no file has.
inline sockaddr_un address_of(const ncclUniqueId& id, int rank) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = std::string(id.internal) + "-" + std::to_string(rank);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return address;
}

inline bool connect_ranks(ncclComm& comm, const ncclUniqueId& id) {
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0), count = static_cast<int>(comm.sockets.size());
  const sockaddr_un mine = address_of(id, comm.rank);
  bool connected = listener >= 0 && bind(listener, reinterpret_cast<const sockaddr*>(&mine), sizeof mine) == 0 &&
                   listen(listener, count) == 0;
  for (int peer = 0; connected && peer < comm.rank; ++peer) {
    const int to = comm.sockets[static_cast<std::size_t>(peer)] = socket(AF_UNIX, SOCK_STREAM, 0);
    const sockaddr_un theirs = address_of(id, peer);
    while (connect(to, reinterpret_cast<const sockaddr*>(&theirs), sizeof theirs) != 0 && connected) {
      connected = std::chrono::steady_clock::now() < patience;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    connected = connected && ::send(to, &comm.rank, sizeof comm.rank, MSG_NOSIGNAL) == sizeof comm.rank;
  }
  for (int peer = comm.rank + 1; connected && peer < count; ++peer) {
    pollfd wait{listener, POLLIN, 0};
    connected = poll(&wait, 1, 60'000) == 1;
    int from = -1, rank = -1;
    if (connected) from = accept(listener, nullptr, nullptr);
    connected =
        from >= 0 && ::recv(from, &rank, sizeof rank, MSG_WAITALL) == sizeof rank && rank > comm.rank && rank < count;
    if (connected) comm.sockets[static_cast<std::size_t>(rank)] = from;
  }
  close(listener);
  return connected;
}

}  // namespace cuda_on_cpu

inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  const std::string name = "nccl-on-cpu-" + std::to_string(getpid()) + "-" + std::to_string(random());
  *id = {};
  std::memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}
inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int count, ncclUniqueId id, int rank) {
  if (rank < 0 || rank >= count) return ncclInvalidArgument;
  auto made = std::make_unique<ncclComm>();
  made->rank = rank;
  made->sockets.assign(static_cast<std::size_t>(count), -1);
  made->buffers.assign(static_cast<std::size_t>(count), nullptr);
  if (!cuda_on_cpu::connect_ranks(*made, id)) return ncclSystemError;
  return *comm = made.release(), ncclSuccess;
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return *error = comm->error, ncclSuccess;
}
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
  for (const int socket : comm->sockets)
    if (socket >= 0) shutdown(socket, SHUT_RDWR);  // ends the messages under way
  while (comm->under_way > 0) std::this_thread::yield();
  return delete comm, ncclSuccess;
}

// Both wait until the messages of this rank are done.
inline ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  while (comm->under_way > 0) std::this_thread::yield();
  return ncclSuccess;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ncclCommFinalize(comm);
  return delete comm, ncclSuccess;
}

inline ncclResult_t ncclGroupStart() { return ++cuda_on_cpu::group_depth, ncclSuccess; }
inline ncclResult_t ncclGroupEnd() { return --cuda_on_cpu::group_depth > 0 ? ncclSuccess : cuda_on_cpu::end_group(); }
inline ncclResult_t ncclSend(const void* data, std::size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return cuda_on_cpu::add_to_group({comm, peer, static_cast<char*>(const_cast<void*>(data)), count, true, stream});
}
inline ncclResult_t ncclRecv(void* data, std::size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
  return cuda_on_cpu::add_to_group({comm, peer, static_cast<char*>(data), count, false, stream});
}
