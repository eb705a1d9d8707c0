// TensorBoard's event files: records of protocol buffers, each with its length and checksums. Written by hand: of the format
// only scalars, texts and hyperparameters are needed.
//
//   record   length (8 bytes), checksum of the length, Event, checksum of the Event
//   Event    1: wall time (double)  2: step  3: "brain.Event:2" in the first  5: Summary  7: SessionLog
#pragma once

#include <fstream>

#include "data/files/files.h"
#include "kernels/base/matrix.cuh"
#include "text/json.h"

namespace streambp {

// Fields of a protocol buffer, in its wire format.
class ProtocolBuffer {
 public:
  ProtocolBuffer& integer(int field, std::uint64_t value) { return key(field, 0).varint(value); }
  ProtocolBuffer& real64(int field, double value) { return key(field, 1).raw(value); }
  ProtocolBuffer& real32(int field, float value) { return key(field, 5).raw(value); }
  ProtocolBuffer& text(int field, std::string_view value) {
    key(field, 2).varint(value.size());
    bytes_ += value;
    return *this;
  }
  ProtocolBuffer& message(int field, const ProtocolBuffer& value) { return text(field, value.bytes_); }
  const std::string& bytes() const { return bytes_; }

 private:
  ProtocolBuffer& key(int field, unsigned type) { return varint(static_cast<std::uint64_t>(field) << 3 | type); }
  ProtocolBuffer& varint(std::uint64_t value) {
    for (; value >= 128; value >>= 7) bytes_ += static_cast<char>((value & 127) | 128);
    bytes_ += static_cast<char>(value);
    return *this;
  }
  template <class T>
  ProtocolBuffer& raw(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }

  std::string bytes_;
};

class EventFile {
 public:
  // A new file in a run's directory. TensorBoard drops what older files there say of steps after the first.
  EventFile(const fs::path& directory, Index first_step);

  // A line of metrics.jsonl: numbers become scalars, a sample a text, the beginning of a run its hyperparameters.
  void add(const Json& line);

 private:
  void write(Index step, int field, const ProtocolBuffer& content);
  void write_record(const std::string& event);
  void add_text(Index step, const std::string& tag, const std::string& text);
  void add_hyperparameters(const Json& options);

  fs::path path_;
  std::ofstream file_;
};

}  // namespace streambp
