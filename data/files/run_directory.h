// The output directory of a run (--out; docs/fine-tuning.md lists its files). Only one process at a time writes here:
// it locks the directory until it ends. Of the ranks of a run, it is the first. Files with other names are not the
// run's: a new run refuses a directory that has any, and no run removes them.
#pragma once

#include <fcntl.h>
#include <sys/file.h>

#include "data/files/checkpoint.h"
#include "data/files/lines.h"

namespace streambp {

class RunDirectory {
 public:
  enum class Begin { fresh, resume };
  enum class Keep { always, newest_two, best };  // newest_two: for automatic checkpoints; best: until another is better

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

  bool has_saved(Index step) const { return checkpoint_.filename() == checkpoint_name(step); }

  // The file with the options of the run to resume, in the field "options". Without a checkpoint it is run.json.
  fs::path state_file() const { return checkpoint_.empty() ? path_ / "run.json" : state_of(checkpoint_); }

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
    require(!error, path_.empty() ? "out" : path_.string(), ": cannot create the output directory: ", error.message(),
            "; give another --out");
    lock();
    if (!resumes_) check_fresh();  // again, under the lock: another run may have started meanwhile
  }

  // Prepares the directory for step + 1: removes unfinished files of an interrupted run, and drops metrics of later
  // steps. `options`: the options that a later --resume needs.
  void open(Index step, const Json& options) {
    if (!writes_) return;
    create();
    remove_temporary_files();
    if (step == 0) write_sealed_json(path_ / "run.json", {{"options", options}});
    const fs::path metrics = keep_until(step, "metrics.jsonl");
    recall_best(metrics);
    metrics_.open(metrics, std::ios::app);
    opened_ = true;
  }

  // Returns whether the file is still there, with its earlier lines. If it is not, a new one begins with this line.
  bool write_metrics(const Json& line) {
    if (!writes_) return true;
    const fs::path path = path_ / "metrics.jsonl";
    const bool there = is_there(path);
    if (!there) metrics_.close(), metrics_.open(path, std::ios::app);
    metrics_ << line.dump() << "\n" << std::flush;
    require(metrics_.good(), path.string(), ": cannot write: ", std::strerror(errno));
    return there;
  }

  // Removes the lines for steps after `step` from a file.
  fs::path keep_until(Index step, const char* name) const {
    const fs::path path = path_ / name;
    if (!writes_) return path;
    std::optional<Lines> old;
    if (step > 0 && fs::exists(path)) old.emplace(path, kLongestLine);
    write_file_atomically(path, [&](std::ostream& kept) {
      for (std::string line; old && old->next(line);) {
        const Json json = json_or_null(line);
        if (json.is_object() && json.contains("step") && json["step"].is_number() && json["step"] <= step)
          kept << line << "\n";
      }
    });
    return path;
  }

  struct Saved {
    fs::path path, aside;  // aside: where something else went that had the name of the checkpoint; usually empty
    std::string unlinked;  // why OUT/last does not name it
  };
  // Saves the engine's weights and optimizer as checkpoint state["step"].
  template <class Engine>
  Saved save(Engine& engine, const ModelLayout& layout, Json state, Keep keep) {
    if (keep != Keep::always) state["automatic"] = keep == Keep::best ? Json("best") : Json(true);
    const fs::path saved = path_ / checkpoint_name(state.at("step").get<Index>());
    const fs::path aside = engine.save(path_, layout, state);
    checkpoint_ = saved;
    if (!writes_) return {checkpoint_, aside, ""};
    const std::string unlinked = link_to_checkpoint(saved, "last");
    const bool is_evaluated = std::isfinite(best_.loss) && is_complete_checkpoint(best_.path);
    if (!is_evaluated) name_best(INFINITY);
    if (keep == Keep::newest_two) remove_old_checkpoints();
    return {checkpoint_, aside, unlinked};
  }

  // --- Held-out losses ---

  // Of on-line GRPO, negative rewards.
  struct HeldOut {
    Index step = 0;
    double loss = INFINITY;
    fs::path path = {};  // the checkpoint, if it is one
  };
  const HeldOut& best() const { return best_; }  // of all checkpoints; without evaluations the newest
  bool is_better(double loss) const { return loss < best_.loss || !is_complete_checkpoint(best_.path); }

  void evaluated(Index step, double loss) { evaluations_.push_back({step, loss}); }
  HeldOut lowest() const {
    const auto found = std::ranges::min_element(evaluations_, {}, &HeldOut::loss);
    return found == evaluations_.end() ? HeldOut() : *found;
  }
  // How many evaluations in a row were worse than the best before them. Only those after every so many steps count, not
  // where a run was stopped: so it stops at the same step.
  Index worse(Index every) const {
    HeldOut lowest;
    Index count = 0;
    for (const HeldOut& e : evaluations_) {
      if (every == 0 || e.step % every != 0) continue;
      count = e.loss < lowest.loss ? 0 : count + 1;
      if (count == 0) lowest = e;
    }
    return count;
  }
  // The newest checkpoint is the best one.
  void name_best(double loss) {
    best_ = {*checkpoint_step(checkpoint_.filename().string()), loss, checkpoint_};
    if (writes_) link_to_checkpoint(checkpoint_, "best"), remove_old_checkpoints();
  }

  // Newer checkpoints with a missing part. They are skipped, with a note.
  std::vector<fs::path> incomplete() const {
    std::vector<fs::path> found;
    for (const fs::path& path : all_checkpoints(path_))
      if (path > checkpoint_ && !is_complete_checkpoint(path) && !is_of_killed_run(path)) found.push_back(path);
    return found;
  }

  // For the message of a failed run: where its last weights are.
  std::string last_checkpoint() const {
    return checkpoint_.empty() ? "there is no checkpoint yet, so --resume would start again at the first step"
                               : "the last checkpoint is " + checkpoint_.string() + "; --resume continues there";
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
      if (is_cache(entry.path().filename().string(), "tokens-")) found.insert(entry.path());
    return found;
  }

  // --- Names ---

  static bool is_digits(std::string_view text, const char* digits) {
    return !text.empty() && text.find_first_not_of(digits) == std::string_view::npos;
  }
  // tokens-0123456789abcdef.safetensors
  static bool is_cache(std::string_view name, std::string_view kind) {
    constexpr std::string_view end = ".safetensors";
    return name.size() == kind.size() + 16 + end.size() && name.starts_with(kind) && name.ends_with(end) &&
           is_digits(name.substr(kind.size(), 16), "0123456789abcdef");
  }
  static bool is_file_of_a_run(std::string_view name) {
    return name == "run.json" || name == "metrics.jsonl" || name == "completions.jsonl" || name == "report.html" ||
           name == "last" || name == "best" || is_cache(name, "tokens-") || is_cache(name, "reference-");
  }
  static bool is_checkpoint(const std::string& name) {
    const auto step = checkpoint_step(name);
    return step && checkpoint_name(*step) == name;
  }
  // The name of an unfinished file or checkpoint, as write_file_atomically and save_checkpoint choose them.
  static bool is_unfinished(const std::string& name) {
    const std::size_t end = name.rfind(".tmp");
    if (end == std::string::npos) return false;
    const std::string whole = name.substr(0, end), number = name.substr(end + 4);
    if (number.empty()) return is_checkpoint(whole.ends_with(".old") ? whole.substr(0, whole.size() - 4) : whole);
    return number[0] == '-' && is_digits(number.substr(1), "0123456789") && is_file_of_a_run(whole);
  }

  // Whether a run was killed while it saved or removed this checkpoint.
  static bool is_of_killed_run(const fs::path& checkpoint) {
    return fs::exists(checkpoint.string() + ".tmp") || fs::exists(checkpoint.string() + ".old.tmp");
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
    const bool failed = failed_before_a_step();
    require(failed || !is_sealed_json(path_ / "run.json"), name,
            ": holds a run that left no checkpoint; start it again with the ",
            "same options by --resume, or give another --out, or remove ", name);
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(path_, error)) {
      const std::string other = entry.path().filename().string();
      const std::set<std::string> own = {"run.json", "metrics.jsonl", "completions.jsonl", "report.html"};
      require((failed && own.contains(other)) || is_unfinished(other) || is_cache(other, "tokens-") ||
                  is_cache(other, "reference-"),
              name, ": holds ", quote(other),
              ", which may be yours; a new run needs a new or empty directory, so give another --out");
    }
  }

  // Such as by a mistyped reward program: nothing of the run is worth keeping.
  bool failed_before_a_step() const {
    std::error_code error;
    if (!is_sealed_json(path_ / "run.json") || !fs::is_regular_file(path_ / "metrics.jsonl", error)) return false;
    Lines lines(path_ / "metrics.jsonl", kLongestLine);
    bool failed = false;
    for (std::string line; lines.next(line);) {
      const Json json = json_or_null(line);
      if (!json.is_object() || json.value("step", Json(0)) > Json(0)) return false;
      failed |= json.contains("error");
    }
    return failed;
  }

  void check_resume() const {
    const std::string name = path_.string();
    require(fs::exists(path_), name,
            ": no such directory, so no complete checkpoint to resume from; check the path, or ",
            "start the run without --resume");
    const std::vector<fs::path> damaged = incomplete();
    require(!checkpoint_.empty() || damaged.empty(), damaged.empty() ? "" : damaged[0].string(),
            ": a part of this checkpoint is missing, and there is no other to resume from; restore it (the model, and ",
            "its state in ", name, "/training), or move what is left of it away to start again at the first step");
    if (!checkpoint_.empty() || fs::exists(path_ / "run.json")) return;
    require(!fs::exists(path_ / "metrics.jsonl"), name, ": no complete checkpoint to resume from; to start from the ",
            "beginning, remove ", name, " and start the run without --resume");
    fail(name, ": no complete checkpoint to resume from; start the run without --resume");
  }

  // What a killed process left unfinished. Under the lock, no other process is writing it.
  void remove_temporary_files() const {
    std::vector<fs::path> stale;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(path_, error))
      if (is_unfinished(entry.path().filename().string())) stale.push_back(entry.path());
    for (const auto& entry : fs::directory_iterator(path_ / "training", error)) {
      const std::string name = entry.path().filename().string();
      const bool has_no_model = is_checkpoint(name) && !fs::exists(path_ / name);
      if (is_unfinished(name) || (has_no_model && is_of_killed_run(path_ / name))) stale.push_back(entry.path());
    }
    for (const fs::path& path : stale) fs::remove_all(path, error);
  }

  // What the lines of an interrupted run say. It may have been killed before it made the link.
  void recall_best(const fs::path& metrics) {
    Lines lines(metrics, kLongestLine);
    for (std::string line; lines.next(line);) {
      const Json json = json_or_null(line), reward = json.value("evaluation_reward", Json()),
                 loss = json.value("evaluation_loss", Json());
      const auto step = json.value("step", Index{0});
      if (step == 0 || !(loss.is_number() || reward.is_number())) continue;
      const double held_out = loss.is_number() ? loss.get<double>() : -reward.get<double>();
      const fs::path path = path_ / checkpoint_name(step);
      evaluated(step, held_out);
      if (held_out < best_.loss && is_complete_checkpoint(path)) best_ = {step, held_out, path};
    }
    if (!best_.path.empty()) link_to_checkpoint(best_.path, "best");
    if (!checkpoint_.empty()) link_to_checkpoint(checkpoint_, "last");
  }

  void remove_old_checkpoints() const {
    std::vector<fs::path> automatic, once_best;
    for (const fs::path& path : complete_checkpoints(path_)) {
      try {
        const Json state = read_sealed_json(state_of(path)), kept = state.value("automatic", Json());
        if (!kept.is_null()) (kept == "best" ? once_best : automatic).push_back(path);
      } catch (const Error&) {  // damaged: leave it to the user
      }
    }
    automatic.resize(std::max<std::size_t>(automatic.size(), 2) - 2);
    automatic.insert(automatic.end(), once_best.begin(), once_best.end());
    for (const fs::path& path : automatic)
      if (path != best_.path && path != checkpoint_) remove_checkpoint(path);
  }

  static constexpr std::size_t kLongestLine = std::size_t{1} << 30;

  fs::path path_, checkpoint_;
  HeldOut best_;
  std::vector<HeldOut> evaluations_;
  bool resumes_, writes_ = true, opened_ = false;
  std::vector<fs::path> created_;
  std::set<fs::path> tokens_before_;
  Descriptor lock_;
  std::ofstream metrics_;
};

}  // namespace streambp
