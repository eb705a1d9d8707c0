// A user's program that rewards completions (--reward-cmd). The shell starts it once. For every line of JSON on its
// standard input, with "completion", "prompt" and the data's other fields, it writes a line with one finite number to
// its standard output, in the same order. It may answer in batches, because requests are written without waiting for
// answers, but it does not know how many come, so it must flush its answers. When the run ends, even if it is killed,
// all that the program has started is killed.
#pragma once

#include <poll.h>

#include <charconv>
#include <cmath>
#include <type_traits>

#include "data/files/files.h"
#include "text/fields.h"
#include "training/grpo/shell_program.h"

namespace streambp {

class RewardProgram {
 public:
  static constexpr std::size_t kLongest = 1000;  // bytes of an answer, without the newline

  // `seconds`: the time limit of one call; the first call includes the program's start-up.
  RewardProgram(const std::string& command, double seconds)
      : name_("reward program " + shown(command, 200) + ": "), seconds_(checked(seconds)), program_(command, name_) {}

  // One number for each request. After an Error the program is killed, and every further call throws the same Error.
  std::vector<double> rewards(const std::vector<Json>& requests) {
    require(failure_.empty(), failure_);
    return or_stop([&] { return ask(requests); });
  }

  // Refuses output that no request has asked for. If rewards() has failed for another reason, its numbers are right.
  void check_quiet() { require_quiet(0); }

  // Call after the last rewards(): closes the program's input and checks what it still writes until it ends, for at most
  // this long, or until its time limit.
  void finish(double seconds = INFINITY) {
    program_.input.reset();
    require_quiet(std::min(seconds, seconds_));
  }

  // Quotes untrusted text for a message: limited in length, without terminal control characters.
  static std::string shown(std::string_view text, std::size_t longest = 60) {
    std::string quoted = "\"";
    for (const unsigned char c : text.substr(0, longest)) {
      char code[5];
      std::snprintf(code, sizeof code, c == '\n' ? "\\n" : c < ' ' || c > '~' ? "\\x%02x" : "%c", c);
      quoted += code;
    }
    return quoted + (text.size() > longest ? "...\"" : "\"");
  }

 private:
  static constexpr double kQuiet = 0.05;  // seconds without output, after which no more is expected
  static constexpr double kMoment = ShellProgram::kMoment;

  double checked(double seconds) const {
    require(seconds > 0, name_, "the time limit must be more than 0 s, not ", seconds);
    return seconds;
  }

  template <class F>
  std::invoke_result_t<F> or_stop(F&& f) {
    try {
      return f();
    } catch (const std::exception& error) {
      failure_ = error.what();
      program_.stop(0);
      throw;
    }
  }

  void require_quiet(double seconds) {
    require(!surplus_, failure_);
    if (failure_.empty()) or_stop([&] { listen(seconds); });
  }

  // Refuses any output of the next seconds.
  void listen(double seconds) {
    for (const double until = ShellProgram::now() + seconds;;) {
      receive();
      if (!read_.empty()) fail_surplus();
      const double left = until - ShellProgram::now();
      if (output_ended_ || left <= 0) return;
      // Its children may keep its output open, so after the program has ended, silence means that nothing will come.
      const bool ended = program_.ended_within(0);
      pollfd end = {program_.output.file, POLLIN, 0};
      if (poll(&end, 1, milliseconds(std::min(left, kQuiet))) == 0 && ended) return;
    }
  }

  static int milliseconds(double seconds) { return static_cast<int>(std::ceil(seconds * 1000)); }

  std::vector<double> ask(const std::vector<Json>& requests) {
    std::string questions;
    for (const Json& request : requests) questions += line_of(request);
    std::string_view unsent = questions;
    listen(0);
    asked_ = requests.size();
    answers_.clear();

    bool heard = true;
    for (double deadline = ShellProgram::now() + seconds_; !unsent.empty() || answers_.size() < asked_;) {
      if (output_ended_) fail_ended();
      const double left = deadline - ShellProgram::now();
      if (left <= 0) fail_late(heard);
      // Its children may keep its output open, so after the program has ended, silence means that no answer will come.
      const bool ended = program_.ended_within(0);
      pollfd ends[] = {{program_.output.file, POLLIN, 0},
                       {unsent.empty() || !heard ? -1 : program_.input.file, POLLOUT, 0}};
      const int ready = poll(ends, 2, milliseconds(std::min(left, kMoment / 4)));
      if (ready == 0 && ended) fail_ended();
      if (ready <= 0) continue;
      if (ends[0].revents != 0) receive();
      take_answers();
      if (answers_.size() == asked_ && !unsent.empty()) fail_surplus();
      if (ends[1].revents != 0 && !send(unsent)) {
        heard = false;  // an answer or the exit status may still arrive
        deadline = std::min(deadline, ShellProgram::now() + kMoment);
      }
    }
    listen(kQuiet);
    return answers_;
  }

  // Some languages end a line at U+0085, U+2028 and U+2029, too.
  static std::string line_of(const Json& request) {
    std::string line = text_of(request);
    for (const std::string_view end : {"\u0085", "\u2028", "\u2029"}) {
      const std::string escaped = Json(end).dump(-1, ' ', true);
      for (std::size_t at; (at = line.find(end)) != std::string::npos;)
        line.replace(at, end.size(), escaped, 1, escaped.size() - 2);  // without its quotes
    }
    return line + '\n';
  }

  // False if the program has closed its input.
  bool send(std::string_view& unsent) {
    const ssize_t n = write(program_.input.file, unsent.data(), unsent.size());
    if (n > 0) unsent.remove_prefix(static_cast<std::size_t>(n));
    return n >= 0 || errno == EAGAIN || errno == EINTR;
  }

  void receive() {
    char block[1 << 16];
    const ssize_t n = ::read(program_.output.file, block, sizeof block);
    if (n > 0) read_.append(block, static_cast<std::size_t>(n));
    output_ended_ = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
  }

  // Parses the complete lines that were read.
  void take_answers() {
    std::size_t at = 0;
    while (answers_.size() < asked_) {
      const std::size_t end = std::min(read_.find('\n', at), read_.size());
      const std::string_view line = std::string_view(read_).substr(at, end - at);
      if (line.size() > kLongest)
        fail(name_, request(), " is answered with a line of more than ", kLongest, " bytes, ", shown(line), "; ",
             kProtocol);
      if (end == read_.size()) break;
      double reward;
      if (!parse(line, reward))
        fail(name_, request(), " is answered with ", shown(line), ", which is not a finite number; ", kProtocol);
      answers_.push_back(reward);
      at = end + 1;
    }
    read_.erase(0, at);
    if (answers_.size() == asked_ && !read_.empty()) fail_surplus();
  }

  // The request that is waiting for an answer.
  std::string request() const {
    return "request " + std::to_string(answers_.size() + 1) + " of " + std::to_string(asked_);
  }

  static bool parse(std::string_view line, double& reward) {
    constexpr const char* blanks = " \t\r";
    line.remove_prefix(std::min(line.find_first_not_of(blanks), line.size()));
    line.remove_suffix(line.size() - (line.find_last_not_of(blanks) + 1));
    if (line.starts_with('+') && !line.starts_with("+-")) line.remove_prefix(1);
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), reward);
    return error == std::errc() && end == line.data() + line.size() && std::isfinite(reward);
  }

  // The program has written a line too many. It may be any of them, so what was taken for the reward of a completion
  // may be that of another.
  [[noreturn]] void fail_surplus() {
    surplus_ = true;
    const std::string last = "its last request, number " + std::to_string(asked_);
    std::string what = "wrote " + shown(read_) + (asked_ > 0 ? " after the answer to " + last : " without being asked");
    if (read_.empty()) what = "answered " + last + ", before it read it";
    fail(name_, what, ", so its rewards may belong to other completions; ", kProtocol);
  }

  [[noreturn]] void fail_ended() {
    if (!program_.ended_within(kMoment))
      fail(name_, "closed its standard output before it answered ", request(), rest(), "; ", kProtocol);
    const int status = program_.end().si_status;
    std::string how, remedy = "; see what it wrote to standard error, or try it by hand with a line of JSON";
    if (program_.end().si_code == CLD_EXITED) {
      how = " with exit status " + std::to_string(status);
      if (status > 128) how += " (128 + " + signal_name(status - 128) + ")";
      if (status == 126) remedy = "; the shell cannot execute the file: check its permissions";
      if (status == 127) remedy = "; the shell cannot find the program: check the command";
    } else if (program_.end().si_code == CLD_KILLED || program_.end().si_code == CLD_DUMPED) {
      how = " by " + signal_name(status);
    }
    fail(name_, "ended", how, " before it answered ", request(), rest(), remedy);
  }

  [[noreturn]] void fail_late(bool heard) {
    if (!heard) fail(name_, "closed its standard input before it answered ", request(), rest(), "; ", kProtocol);
    fail(name_, "did not answer ", request(), " in the ", seconds_, " s that one call may take", rest(),
         "; flush its output after every answer, or raise --reward-seconds");
  }

  static std::string signal_name(int number) { return "signal " + std::to_string(number) + ", " + strsignal(number); }

  // An incomplete line.
  std::string rest() const { return read_.empty() ? "" : ", after an incomplete line " + shown(read_); }

  static constexpr const char* kProtocol =
      "it must write one line with a number for every line that it reads, and everything else to standard error";

  const std::string name_;
  const double seconds_;
  ShellProgram program_;
  std::string failure_;
  bool surplus_ = false;   // why it failed
  std::size_t asked_ = 0;  // requests of this call
  std::vector<double> answers_;
  std::string read_;  // from it, not parsed yet
  bool output_ended_ = false;
};

}  // namespace streambp
