// The lines of a text file.
#pragma once

#include "data/files/files.h"

namespace streambp {

// Reads a file line by line; the file may be larger than memory. Line ends and a byte order mark are removed.
class Lines {
 public:
  explicit Lines(const fs::path& path, std::size_t longest = kLongestText)
      : path_(path), longest_(longest), bytes_(regular_file_size(path)), file_(open_to_read(path)) {}

  bool next(std::string& line) {
    line.clear();
    ++number_;
    bool any = false;
    for (bool complete = false; !complete;) {
      if (at_ == end_ && !fill()) {
        if (!any) return false;
        break;
      }
      any = true;
      const char* begin = block_.data() + at_;
      const auto* found = static_cast<const char*>(std::memchr(begin, '\n', end_ - at_));
      complete = found != nullptr;
      const std::size_t n = complete ? static_cast<std::size_t>(found - begin) : end_ - at_;
      require(line.size() + n <= longest_, where(), "the line has more than ", longest_,
              " bytes; write one example per line, or put a very long text into a separate .txt file");
      line.append(begin, n);
      at_ += n + complete;
    }
    if (number_ == 1 && line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);
    if (line.ends_with('\r')) line.pop_back();
    return true;
  }

  // The position of the last line for messages, such as "file:17: ".
  std::string where() const { return path_.string() + ":" + std::to_string(number_) + ": "; }
  // How much of the file has been read.
  double fraction() const { return bytes_ == 0 ? 1 : static_cast<double>(read_) / static_cast<double>(bytes_); }

 private:
  bool fill() {
    at_ = 0;
    end_ = read_block(file_, block_, path_);
    read_ += end_;
    return end_ > 0;
  }

  fs::path path_;
  std::size_t longest_, bytes_, read_ = 0, at_ = 0, end_ = 0;
  FilePointer file_;
  std::string block_ = std::string(1 << 20, '\0');
  std::size_t number_ = 0;
};

}  // namespace streambp
