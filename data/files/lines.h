// The lines of a text file, and the JSON values of a data file.
#pragma once

#include "data/files/reader.h"

namespace streambp {

// Reads a file line by line; the file may be larger than memory. Line ends and a byte order mark are removed.
class Lines {
 public:
  explicit Lines(const fs::path& path, std::size_t longest = kLongestText)
      : path_(path), longest_(longest), reader_(path) {}

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
    if (line.ends_with('\r')) line.pop_back();
    return true;
  }

  // The position of the last line for messages, such as "file:17: ".
  std::string where() const { return path_.string() + ":" + std::to_string(number_) + ": "; }
  // How much of the file has been read.
  double fraction() const { return reader_.fraction(); }

 protected:
  bool fill() {
    const bool begins = block_.empty();
    if (begins) block_.resize(1 << 20);
    at_ = 0;
    end_ = reader_.read(block_);
    if (begins && std::string_view(block_).substr(0, end_).starts_with("\xef\xbb\xbf")) at_ = 3;
    return at_ < end_;
  }

  fs::path path_;
  std::size_t longest_, at_ = 0, end_ = 0;
  Reader reader_;
  std::string block_;
  std::size_t number_ = 0;
};

// Reads the JSON values of a file one by one: its lines, or the elements of an array, [...]. Empty lines are left out.
class JsonValues : private Lines {
 public:
  explicit JsonValues(const fs::path& path, std::size_t longest = kLongestText) : Lines(path, longest) {
    fill();
    const std::size_t first = std::string_view(block_).substr(0, end_).find_first_not_of(" \t\r\n", at_);
    if (first >= end_ || block_[first] != '[') return;
    at_ = first + 1, is_array_ = true;
  }

  bool next(std::string& value) {
    if (is_array_) return next_element(value);
    while (Lines::next(value)) {
      if (value.find_first_not_of(" \t") != std::string::npos) return true;
    }
    return false;
  }

  std::string where() const {
    return is_array_ ? path_.string() + ", example " + std::to_string(number_) + ": " : Lines::where();
  }
  using Lines::fraction;

 private:
  // An element ends at a comma or at the closing bracket, outside of strings and of nested values.
  bool next_element(std::string& value) {
    value.clear();
    if (ended_) return false;
    ++number_;
    bool in_string = false, escaped = false;
    for (std::ptrdiff_t depth = 0;;) {
      require(at_ < end_ || fill(), where(), "the list does not end; is the file complete?");
      const char c = block_[at_++];
      const bool ends = !in_string && depth == 0 && (c == ',' || c == ']');
      if (ends && c == ']') {
        require_end();
        return number_ > 1 || value.find_first_not_of(" \t\r\n") != std::string::npos;  // not: []
      }
      if (ends) return true;
      if (escaped) {
        escaped = false;
      } else if (c == '\\') {
        escaped = in_string;
      } else if (c == '"') {
        in_string = !in_string;
      } else if (!in_string) {
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
      }
      require(value.size() < longest_, where(), "has more than ", longest_, " bytes; split it");
      value += c;
    }
  }
  void require_end() {
    ended_ = true;
    for (; at_ < end_ || fill(); ++at_) {
      require(std::string_view(" \t\r\n").find(block_[at_]) != std::string_view::npos, path_.string(), ": example ",
              number_, " is followed by text after the list");
    }
  }

  bool is_array_ = false, ended_ = false;
};

}  // namespace streambp
