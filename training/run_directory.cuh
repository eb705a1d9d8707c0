// The output directory of a run (--out):
//
//   run.json                  the options that the run started with
//   metrics.jsonl             one line per step and evaluation
//   completions.jsonl         on-line GRPO: the sampled groups
//   tokens-*.safetensors      fine-tuning: the data as tokens, cached
//   reference-*.safetensors   reference log-probs, cached, if they cannot be stored beside the data
//   step-000100/              checkpoints (data/files/checkpoint.cuh)
//
// Only one process at a time writes here. It locks the directory until it ends. Of the ranks of a run, it is the first.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <set>
#include <string>

#include "data/files/checkpoint.cuh"

namespace streambp {

// When to save a checkpoint during a run.
class CheckpointTimer {
 public:
  static constexpr Index kByTime = -1;
  static constexpr double kSeconds = 600;  // between automatic checkpoints

  // every: the number of steps between checkpoints; 0: only at the end; kByTime: about every ten minutes.
  CheckpointTimer(Index every, double now) : every_(every), due_(now + kSeconds) {}

  bool by_time() const { return every_ == kByTime; }
  bool due(Index step, double now) const { return by_time() ? now >= due_ : every_ > 0 && step % every_ == 0; }
  // Saving takes at most 5% of the time, even on a slow disk.
  void saved(double begun, double now) { due_ = now + std::max(kSeconds, 20 * (now - begun)); }

 private:
  Index every_;
  double due_;
};

class RunDirectory {
 public:
  enum class Begin { fresh, resume };
  enum class Keep { always, newest_two };  // newest_two: for automatic checkpoints

  // Locks the directory if it exists, and decides where the run continues. Creates and changes nothing. With an empty
  // name, the directory is the first free out/run-N.
  RunDirectory(const std::string& name, Begin begin) : path_(name), resumes_(begin == Begin::resume) {
    if (name.empty()) {
      require(!resumes_, "--resume needs --out DIR, the directory of the run to continue");
      return;
    }
    std::error_code error;
    const auto status = fs::status(path_, error);
    require(!fs::exists(status) || fs::is_directory(status), name, ": exists and is not a directory; ",
            "give another --out");
    if (fs::exists(status)) lock();
    checkpoint_ = newest_checkpoint(path_);
    resumes_ ? check_resume() : check_fresh();
  }
  // For ranks other than the first: rank 0's directory, in which this rank reads only.
  RunDirectory(const fs::path& path, const fs::path& checkpoint, Begin begin)
      : path_(path), checkpoint_(checkpoint), resumes_(begin == Begin::resume), writes_(false), opened_(true) {}
  RunDirectory(const RunDirectory&) = delete;

  // A refused run removes its token files and the empty directories it created. Other files may belong to someone else.
  ~RunDirectory() {
    if (opened_) return;
    std::error_code ignored;
    for (const fs::path& path : lock_.file >= 0 ? token_files() : std::set<fs::path>())
      if (!tokens_before_.contains(path)) fs::remove(path, ignored);
    for (auto directory = created_.rbegin(); directory != created_.rend(); ++directory) rmdir(directory->c_str());
  }

  const fs::path& path() const { return path_; }
  bool resumes() const { return resumes_; }
  const fs::path& checkpoint() const { return checkpoint_; }  // to resume from; empty: the run begins at step 0

  // The file with the options of the run to resume, in the field "options". Without a checkpoint it is run.json.
  fs::path state_file() const { return checkpoint_.empty() ? path_ / "run.json" : checkpoint_ / "training/state.json"; }

  // Creates the directory. Runs that look for a free out/run-N at the same time get different ones, because mkdir
  // succeeds for only one of them.
  void create() {
    if (lock_.file >= 0 || !writes_) return;
    std::error_code error;
    if (path_.empty()) {
      make("out", error);
      bool mine = false;
      for (Index i = 1; !error && !mine; ++i)
        mine = make(path_ = fs::path("out") / ("run-" + std::to_string(i)), error);
    } else {
      make(path_, error);
    }
    require(!error, path_.string(), ": cannot create the output directory: ", error.message(), "; give another --out");
    lock();
    if (!resumes_) check_fresh();  // again, under the lock: another run may have started meanwhile
  }

  // Prepares the directory for step + 1: removes unfinished files of an interrupted run, and drops metrics of later
  // steps. `options`: the options that a later --resume needs.
  void open(Index step, const Json& options) {
    if (!writes_) return;
    create();
    remove_temporary_files();
    if (step == 0) write_file_atomically(path_ / "run.json", Json{{"options", options}}.dump(2) + "\n");
    metrics_.open(keep_until(step, "metrics.jsonl"), std::ios::app);
    opened_ = true;
  }

  void write_metrics(const Json& line) {
    if (!writes_) return;
    metrics_ << line.dump() << "\n" << std::flush;
    require(metrics_.good(), (path_ / "metrics.jsonl").string(), ": cannot write: ", std::strerror(errno),
            "; free some space, then continue with --resume");
  }

  // Removes the lines for steps after `step` from a file.
  fs::path keep_until(Index step, const char* name) const {
    const fs::path path = path_ / name;
    if (!writes_) return path;
    std::ifstream old;
    if (step > 0) old.open(path);
    write_file_atomically(path, [&](std::ostream& kept) {
      for (std::string line; std::getline(old, line);) {
        const Json json = Json::parse(line, nullptr, false);
        if (json.is_object() && json.contains("step") && json["step"].is_number() && json["step"] <= step)
          kept << line << "\n";
      }
    });
    return path;
  }

  // Saves the engine's weights and optimizer as checkpoint state["step"]; returns its path.
  template <class Engine>
  fs::path save(Engine& engine, const ModelLayout& layout, Json state, Keep keep) {
    if (keep == Keep::newest_two) state["automatic"] = true;
    const fs::path saved = path_ / checkpoint_name(state.at("step").get<Index>());
    const fs::path aside = engine.save(path_, layout, state);
    if (!aside.empty()) {
      std::printf("note     %s was not a complete checkpoint of this run; it is now %s\n", saved.c_str(),
                  aside.c_str());
    }
    checkpoint_ = saved;
    if (keep == Keep::newest_two && writes_) remove_old_checkpoints();
    return saved;
  }

  // For the message of a failed run: where its last weights are.
  std::string last_checkpoint() const {
    return checkpoint_.empty() ? "there is no checkpoint yet" : "the last checkpoint is " + checkpoint_.string();
  }

 private:
  void lock() {
    lock_.file = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    require(lock_.file >= 0, path_.string(), ": cannot open the directory: ", std::strerror(errno),
            "; give another --out");
    const bool others = flock(lock_.file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;  // else: no locks here
    if (others) created_.clear(), lock_.reset();
    require(!others, path_.string(), ": another run is writing here; give another --out, or wait for it");
    tokens_before_ = token_files();
  }

  std::set<fs::path> token_files() const {
    std::set<fs::path> found;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(path_, error))
      if (entry.path().filename().string().starts_with("tokens-")) found.insert(entry.path());
    return found;
  }

  // mkdir -p. Returns whether this process made the last directory, and remembers all that it made.
  bool make(const fs::path& path, std::error_code& error) {
    if (!path.parent_path().empty() && !fs::exists(path.parent_path())) make(path.parent_path(), error);
    if (error || path.filename().empty()) return false;
    const bool mine = mkdir(path.c_str(), 0777) == 0;
    if (mine) created_.push_back(path);
    if (!mine && (errno != EEXIST || !fs::is_directory(path))) error.assign(errno, std::generic_category());
    return mine;
  }

  void check_fresh() const {
    const std::string name = path_.string();
    require(newest_checkpoint(path_).empty(), name, ": holds a run already; continue it with --resume, or give ",
            "another --out");
    if (!fs::exists(path_ / "metrics.jsonl")) return;
    require(!fs::exists(path_ / "run.json"), name, ": holds a run that left no checkpoint; start it again with the ",
            "same options by --resume, or give another --out, or remove ", name);
    fail(name, ": holds a run that left no checkpoint; give another --out, or remove ", name);
  }

  void check_resume() const {
    const std::string name = path_.string();
    require(fs::exists(path_), name,
            ": no such directory, so no complete checkpoint to resume from; check the path, or ",
            "start the run without --resume");
    if (!checkpoint_.empty() || fs::exists(path_ / "run.json")) return;
    require(!fs::exists(path_ / "metrics.jsonl"), name, ": no complete checkpoint to resume from; to start from the ",
            "beginning, remove ", name, " and start the run without --resume");
    fail(name, ": no complete checkpoint to resume from; start the run without --resume");
  }

  // Unfinished files of a killed process. Under the lock, no other process is writing them.
  void remove_temporary_files() const {
    std::vector<fs::path> stale;
    for (const auto& entry : fs::directory_iterator(path_)) {
      const std::string name = entry.path().filename().string();
      const std::size_t end = name.find(".tmp");
      if (end == std::string::npos) continue;
      const bool file = name.find_first_not_of("0123456789", end + 5) == std::string::npos &&
                        name.compare(end, 5, ".tmp-") == 0 && name.size() > end + 5 && entry.is_regular_file();
      const std::string stem = name.substr(0, name.find(".old.tmp"));
      const bool checkpoint = name.size() == end + 4 && entry.is_directory() &&
                              (checkpoint_step(name.substr(0, end)) || (stem != name && checkpoint_step(stem)));
      if (file || checkpoint) stale.push_back(entry.path());
    }
    std::error_code ignored;
    for (const fs::path& path : stale) fs::remove_all(path, ignored);
  }

  void remove_old_checkpoints() const {
    std::vector<fs::path> automatic;
    for (const fs::path& path : complete_checkpoints(path_)) {
      const Json state = Json::parse(std::ifstream(path / "training/state.json"), nullptr, false);
      if (state.is_object() && state.value("automatic", Json()) == true) automatic.push_back(path);
    }
    for (std::size_t i = 0; i + 2 < automatic.size(); ++i) remove_checkpoint(automatic[i]);
  }

  fs::path path_, checkpoint_;
  bool resumes_, writes_ = true, opened_ = false;
  std::vector<fs::path> created_;
  std::set<fs::path> tokens_before_;
  Descriptor lock_;
  std::ofstream metrics_;
};

}  // namespace streambp
