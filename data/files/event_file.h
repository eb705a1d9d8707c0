// TensorBoard's event files: records of protocol buffers, each with its length and checksums. Written by hand: of the format
// only scalars, texts and hyperparameters are needed.
//
//   record   length (8 bytes), checksum of the length, Event, checksum of the Event
//   Event    1: wall time (double)  2: step  3: "brain.Event:2" in the first  5: Summary  7: SessionLog
#pragma once

#include <unistd.h>
#include <cstring>
#include <ctime>

#include "data/files/files.h"
#include "kernels/base/matrix.cuh"

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
  EventFile(const fs::path& directory, Index first_step) {
    const std::string name =
        "events.out.tfevents." + std::to_string(std::time(nullptr)) + "." + host() + "." + std::to_string(getpid());
    path_ = directory / name;
    file_.open(path_, std::ios::binary | std::ios::app);
    ProtocolBuffer version, started;
    version.real64(1, static_cast<double>(std::time(nullptr))).text(3, "brain.Event:2");
    write_record(version.bytes());
    write(first_step + 1, 7, started.integer(1, 1));  // SessionLog: START
  }

  // A line of metrics.jsonl: numbers become scalars, a sample a text, the beginning of a run its hyperparameters.
  void add(const Json& line) {
    const Index step = line.at("step");
    ProtocolBuffer summary;
    for (const auto& [tag, value] : line.items()) {
      if (tag == "begin") {
        add_hyperparameters(value.at("options"));
        add_text(step, "command", value.at("command"));
      } else if (tag == "sample") {
        add_text(step, "sample", value.at("prompt").get<std::string>() + value.at("text").get<std::string>());
      } else if (tag != "step" && value.is_number()) {
        ProtocolBuffer scalar;
        summary.message(1, scalar.text(1, tag).real32(2, value.get<float>()));
      }
    }
    if (!summary.bytes().empty()) write(step, 5, summary);
  }

 private:
  // CRC-32C, rotated and shifted as the format asks.
  static std::uint32_t checksum(std::string_view bytes) {
    static const auto table = [] {
      std::array<std::uint32_t, 256> all{};
      for (std::uint32_t i = 0; i < 256; ++i) {
        all[i] = i;
        for (int bit = 0; bit < 8; ++bit) all[i] = all[i] >> 1 ^ (all[i] & 1 ? 0x82f63b78u : 0);
      }
      return all;
    }();
    std::uint32_t crc = ~0u;
    for (const char byte : bytes) crc = crc >> 8 ^ table[(crc ^ static_cast<unsigned char>(byte)) & 255];
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
  }

  template <class T>
  static std::string raw(T value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
  }

  static ProtocolBuffer plugin(const char* name, const ProtocolBuffer& content = {}) {
    ProtocolBuffer data, metadata;
    data.text(1, name).message(2, content);
    return metadata.message(1, data);
  }

  static std::string host() {
    char name[256] = "";
    gethostname(name, sizeof name - 1);
    return name;
  }

  void write(Index step, int field, const ProtocolBuffer& content) {
    ProtocolBuffer event;
    event.real64(1, static_cast<double>(std::time(nullptr))).integer(2, static_cast<std::uint64_t>(step));
    write_record(event.message(field, content).bytes());
  }
  void write_record(const std::string& event) {
    const std::string length = raw(static_cast<std::uint64_t>(event.size()));
    file_ << length << raw(checksum(length)) << event << raw(checksum(event)) << std::flush;
    require(file_.good(), path_.string(), ": cannot write: ", std::strerror(errno));
  }
  void add_text(Index step, const std::string& tag, const std::string& text) {
    constexpr int string_type = 7;
    ProtocolBuffer shape, dimension, tensor, value, summary;
    shape.message(2, dimension.integer(1, 1));
    tensor.integer(1, string_type).message(2, shape).text(8, text);
    value.text(1, tag).message(9, plugin("text")).message(8, tensor);
    write(step, 5, summary.message(1, value));
  }
  // The data of the HParams plugin: an experiment with these hyperparameters, and a session that has their values.
  void add_hyperparameters(const Json& options) {
    ProtocolBuffer start;
    const Json valid = parse_json(text_of(options));  // UTF-8
    for (const auto& [name, value] : valid.items()) {
      ProtocolBuffer of_type, entry;
      if (value.is_number()) {
        of_type.real64(2, value.get<double>());
      } else if (value.is_boolean()) {
        of_type.integer(4, value.get<bool>());
      } else {
        of_type.text(3, value.is_string() ? value.get<std::string>() : value.dump());
      }
      start.message(1, entry.text(1, name).message(2, of_type));
    }
    start.real64(5, static_cast<double>(std::time(nullptr)));
    ProtocolBuffer content, value, summary;
    content.integer(1, 0).message(3, start);
    value.text(1, "_hparams_/session_start_info").message(9, plugin("hparams", content));
    write(0, 5, summary.message(1, value));
  }

  fs::path path_;
  std::ofstream file_;
};

}  // namespace streambp
