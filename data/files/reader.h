// Reads the bytes of a file, decompressed if its name ends with .gz or .zst.
#pragma once

#include <zlib.h>
#include <zstd.h>

#include "data/files/files.h"

namespace streambp {

class Reader {
 public:
  explicit Reader(const fs::path& path) : path_(path), bytes_(regular_file_size(path)), file_(open_to_read(path)) {
    const std::string extension = extension_of(path);
    if (extension == ".gz") decoder_ = std::make_unique<Gzip>();
    if (extension == ".zst") decoder_ = std::make_unique<Zstd>();
  }

  // Fills the block and returns the number of bytes; less than the block only at the end.
  std::size_t read(std::string& block) {
    if (!decoder_) return count(read_block(file_, block, path_));
    std::size_t done = 0;
    while (done < block.size()) {
      std::string_view to_read = std::string_view(compressed_).substr(at_, end_ - at_);
      const std::size_t unread = to_read.size();
      const std::size_t more = decoder_->decode(to_read, block.data() + done, block.size() - done, path_);
      done += more, at_ += unread - to_read.size();
      if (more > 0 || to_read.size() < unread) continue;
      at_ = 0, end_ = count(read_block(file_, compressed_, path_));  // it needs more input
      if (end_ > 0) continue;
      require(decoder_->complete, path_.string(), ": ends in the middle of its compressed data; is the file complete?");
      break;
    }
    return done;
  }

  // How much of the file has been read.
  double fraction() const { return bytes_ == 0 ? 1 : static_cast<double>(read_) / static_cast<double>(bytes_); }

 private:
  struct Decoder {
    bool complete = true;  // between two compressed streams; a file can have several
    virtual ~Decoder() = default;
    // Decodes the beginning of `from`, removes it there, and returns the number of bytes written.
    virtual std::size_t decode(std::string_view& from, char* to, std::size_t room, const fs::path& path) = 0;
  };

  struct Gzip : Decoder {
    Gzip() { require(inflateInit2(&state, 16 + MAX_WBITS) == Z_OK, "zlib does not start; is it installed correctly?"); }
    Gzip(const Gzip&) = delete;
    ~Gzip() override { inflateEnd(&state); }
    std::size_t decode(std::string_view& from, char* to, std::size_t room, const fs::path& path) override {
      if (from.empty() && complete) return 0;
      complete = false;
      state.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(from.data()));
      state.avail_in = static_cast<uInt>(from.size());
      state.next_out = reinterpret_cast<Bytef*>(to);
      state.avail_out = static_cast<uInt>(std::min<std::size_t>(room, 1 << 30));
      const uInt before = state.avail_out;
      const int result = inflate(&state, Z_NO_FLUSH);
      require(result == Z_OK || result == Z_STREAM_END || result == Z_BUF_ERROR, path.string(),
              ": is not valid gzip data: ", state.msg ? state.msg : "it is damaged");
      from.remove_prefix(from.size() - state.avail_in);
      if (result == Z_STREAM_END) complete = inflateReset(&state) == Z_OK;
      return before - state.avail_out;
    }
    z_stream state = {};
  };

  struct Zstd : Decoder {
    std::size_t decode(std::string_view& from, char* to, std::size_t room, const fs::path& path) override {
      ZSTD_inBuffer in = {from.data(), from.size(), 0};
      ZSTD_outBuffer out = {to, room, 0};
      if (from.empty() && complete) return 0;
      const std::size_t left = ZSTD_decompressStream(state.get(), &out, &in);
      require(!ZSTD_isError(left), path.string(), ": is not valid zstd data: ", ZSTD_getErrorName(left));
      complete = left == 0;
      from.remove_prefix(in.pos);
      return out.pos;
    }
    struct Free {
      void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
    };
    std::unique_ptr<ZSTD_DStream, Free> state{ZSTD_createDStream()};
  };

  std::size_t count(std::size_t bytes) { return read_ += bytes, bytes; }

  fs::path path_;
  std::size_t bytes_, read_ = 0;
  FilePointer file_;
  std::unique_ptr<Decoder> decoder_;
  std::string compressed_ = std::string(1 << 16, '\0');
  std::size_t at_ = 0, end_ = 0;  // of compressed_
};

// The whole text of a file, without a byte order mark. The limit is that of memory: a compressed text can be very long.
inline std::string read_text(const fs::path& path, std::size_t limit) {
  const auto require_room = [&](std::size_t bytes) {
    require(bytes <= limit, path.string(), ": has more than ", limit,
            " bytes, too many for the memory that is free; split it");
  };
  require_room(regular_file_size(path));
  Reader reader(path);
  std::string text, block(1 << 20, '\0');
  for (std::size_t n = block.size(); n == block.size();) {
    n = reader.read(block);
    text.append(block, 0, n);
    require_room(text.size());
  }
  if (text.starts_with("\xef\xbb\xbf")) text.erase(0, 3);
  return text;
}

}  // namespace streambp
