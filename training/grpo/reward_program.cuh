// A user's program that rewards completions (--reward-cmd). The shell starts it once. For every line of JSON on its
// standard input,
//
//   {"completion": "...", "prompt": "...", other fields of the data}
//
// it writes a line with one finite number to its standard output, in the same order. Standard error is shared with
// ours. It may answer line by line or in batches, because requests are written without waiting for answers. It does not
// know how many requests will come, so it must flush its answers: print(reward, flush=True), fflush(stdout). It should
// exit at the end of its input. It runs in its own process group. When the run ends, even if it is killed, the rest of
// the group is killed.
#pragma once

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <thread>
#include <utility>
#include <vector>

#include "data/files/fields.cuh"

namespace streambp {

// write() without SIGPIPE when the pipe has no reader. With a socket this would be simpler, but then the program could
// not open /dev/stdin.
inline ssize_t write_without_signal(int file, std::string_view bytes) {
  sigset_t pipe, pending, before;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  sigpending(&pending);
  const ssize_t written = write(file, bytes.data(), bytes.size());
  const int error = errno;
  const timespec at_once{};
  if (written < 0 && error == EPIPE && !sigismember(&pending, SIGPIPE)) sigtimedwait(&pipe, nullptr, &at_once);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = error;
  return written;
}

class RewardProgram {
 public:
  static constexpr std::size_t kLongest = 1000;  // bytes of an answer, without the newline

  // `seconds`: the time limit of one call; the first call includes the program's start-up.
  RewardProgram(std::string command, double seconds)
      : command_(std::move(command)), name_("reward program " + shown(command_, 200) + ": "), seconds_(seconds) {
    require(seconds > 0, name_, "the time limit must be more than 0 s, not ", seconds);
    start();
  }
  RewardProgram(const RewardProgram&) = delete;
  ~RewardProgram() { stop(kMoment); }

  // One number for each request. After an Error the program is killed, and every further call throws the same Error.
  std::vector<double> rewards(const std::vector<Json>& requests) {
    require(failure_.empty(), failure_);
    try {
      return ask(requests);
    } catch (const std::exception& error) {
      failure_ = error.what();
      stop(0);
      throw;
    }
  }

 private:
  static constexpr double kMoment = 1;  // seconds for the program to exit after its input is closed

  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
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

  void start() {
    Descriptor questions, answers;  // the program's ends
    make_pipe(questions, input_);
    make_pipe(output_, answers);
    for (const int ours : {input_.file, output_.file}) fcntl(ours, F_SETFL, fcntl(ours, F_GETFL) | O_NONBLOCK);
    process_ = spawn({"sh", "-c", "--", command_}, questions.file, answers.file);
    start_guard();
  }

  // Starts a shell that reads from a pipe. Only this process holds the write end, so when this process ends for any
  // reason, the shell kills the program's group. (PR_SET_PDEATHSIG would signal only the program's first process, and
  // it fires when a thread ends.)
  void start_guard() {
    Descriptor waiting;
    make_pipe(waiting, lifeline_);
    guard_ = spawn({"sh", "-c", "read -r line; kill -KILL -\"$1\"", "streambp-guard", std::to_string(process_)},
                   waiting.file, STDERR_FILENO);
  }

  // The variables of this process, except those by which MPI would take the program for a rank of the run.
  static std::vector<char*> environment() {
    std::vector<char*> kept;
    for (char** variable = environ; *variable; ++variable) {
      const std::string_view text = *variable;
      bool of_launcher = false;
      for (const char* prefix : {"OMPI_COMM_WORLD", "PMIX_", "PMI_", "MV2_COMM_WORLD", "SLURM_STEP_NUM_TASKS"})
        of_launcher = of_launcher || text.starts_with(prefix);
      if (!of_launcher) kept.push_back(*variable);
    }
    kept.push_back(nullptr);
    return kept;
  }

  // Starts /bin/sh in a new process group. posix_spawn is safe with other threads running, and does not copy the page
  // tables of a large process.
  pid_t spawn(std::vector<std::string> arguments, int input, int output) {
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, input, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, output, STDOUT_FILENO);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t defaults;  // the program must not inherit signals that we ignore
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGXFSZ);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    pid_t process = 0;
    const int error = posix_spawn(&process, "/bin/sh", &files, &attributes, pointers.data(), environment().data());
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) stop(0);
    require(error == 0, name_, "cannot start /bin/sh: ", std::strerror(error));
    return process;
  }

  void make_pipe(Descriptor& reading, Descriptor& writing) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) fail(name_, "cannot create a pipe: ", std::strerror(errno));
    reading.file = ends[0], writing.file = ends[1];
  }

  // Closes the program's input and kills its group `seconds` later. The process id cannot be reused until the program
  // is reaped, so the guard ends first and the kill comes before the wait. A program of another user may survive.
  void stop(double seconds) {
    input_.reset();
    if (process_ > 0) {
      ended_within(seconds);
      if (guard_ > 0) {
        kill(guard_, SIGKILL);
        while (waitpid(guard_, nullptr, 0) < 0 && errno == EINTR) {
        }
        guard_ = 0;
      }
      kill(-process_, SIGKILL);
      if (ended_within(5)) waitpid(process_, nullptr, WNOHANG);
      process_ = 0;
    }
    lifeline_.reset();
    output_.reset();
  }

  // Waits for the program to end; `end_` receives its status.
  bool ended_within(double seconds) {
    for (const double until = now() + seconds;;) {
      end_ = {};
      const bool ours = waitid(P_PID, static_cast<id_t>(process_), &end_, WEXITED | WNOHANG | WNOWAIT) == 0;
      if (!ours || end_.si_pid != 0) return true;  // not ours: with SIGCHLD ignored, the kernel reaps it
      if (now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  std::vector<double> ask(const std::vector<Json>& requests) {
    std::string questions;
    for (const Json& request : requests)
      questions += request.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
    std::string_view unsent = questions;
    asked_ = requests.size();
    answers_.clear();
    receive();
    require(read_.empty(), name_, "wrote ", shown(read_), " without being asked; ", kProtocol);

    bool heard = true;
    for (double deadline = now() + seconds_; !unsent.empty() || answers_.size() < asked_;) {
      if (output_ended_) fail_ended();
      const double left = deadline - now();
      if (left <= 0) fail_late(heard);
      // Its children may keep its output open, so after the program has ended, silence means that no answer will come.
      const bool ended = ended_within(0);
      pollfd ends[] = {{output_.file, POLLIN, 0}, {unsent.empty() || !heard ? -1 : input_.file, POLLOUT, 0}};
      const int ready = poll(ends, 2, static_cast<int>(std::ceil(std::min(left, kMoment / 4) * 1000)));
      if (ready == 0 && ended) fail_ended();
      if (ready <= 0) continue;
      if (ends[0].revents != 0) receive();
      take_answers();
      if (answers_.size() == asked_ && !unsent.empty())
        fail(name_, "answered its last request, number ", asked_, ", before it read it; ", kProtocol);
      if (ends[1].revents != 0 && !send(unsent)) {
        heard = false;  // an answer or the exit status may still arrive
        deadline = std::min(deadline, now() + kMoment);
      }
    }
    receive();
    take_answers();
    return answers_;
  }

  // False if the program has closed its input.
  bool send(std::string_view& unsent) {
    const ssize_t n = write_without_signal(input_.file, unsent);
    if (n > 0) unsent.remove_prefix(static_cast<std::size_t>(n));
    return n >= 0 || errno == EAGAIN || errno == EINTR;
  }

  void receive() {
    char block[1 << 16];
    const ssize_t n = ::read(output_.file, block, sizeof block);
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
    if (answers_.size() == asked_ && !read_.empty())
      fail(name_, "wrote ", shown(read_), " after the answer to its last request, number ", asked_, "; ", kProtocol);
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

  [[noreturn]] void fail_ended() {
    if (!ended_within(kMoment))
      fail(name_, "closed its standard output before it answered ", request(), rest(), "; ", kProtocol);
    const int status = end_.si_status;
    std::string how, remedy = "; see what it wrote to standard error, or try it by hand with a line of JSON";
    if (end_.si_code == CLD_EXITED) {
      how = " with exit status " + std::to_string(status);
      if (status > 128) how += " (128 + " + signal_name(status - 128) + ")";
      if (status == 126) remedy = "; the shell cannot execute the file: check its permissions";
      if (status == 127) remedy = "; the shell cannot find the program: check the command";
    } else if (end_.si_code == CLD_KILLED || end_.si_code == CLD_DUMPED) {
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

  std::string command_, name_, failure_;
  double seconds_;
  Descriptor input_, output_;  // our ends of the program's standard input and output
  Descriptor lifeline_;        // to the guard
  pid_t process_ = 0, guard_ = 0;
  siginfo_t end_ = {};
  std::size_t asked_ = 0;  // requests of this call
  std::vector<double> answers_;
  std::string read_;  // from it, not parsed yet
  bool output_ended_ = false;
};

}  // namespace streambp
