#include "training/timeline.h"

#include <numeric>

#include "training/trainer.h"

namespace streambp {

namespace {

// Numbers as differences between neighbours, and how often each repeats: 5 5 5 7 9 -> [5,1, 0,2, 2,2].
class Runs {
 public:
  void add(std::int64_t value) {
    const std::int64_t difference = value - std::exchange(last_, value);
    if (runs_.empty() || runs_[runs_.size() - 2] != difference) runs_.insert(runs_.end(), {difference, 0});
    ++runs_.back();
  }
  Json json() const { return runs_; }

 private:
  std::int64_t last_ = 0;
  std::vector<std::int64_t> runs_;
};

// Distinct values, numbered as they come.
template <class Value>
class Distinct {
 public:
  std::size_t number(const Value& value) {
    const auto [found, is_new] = numbers_.emplace(value, numbers_.size());
    if (is_new) values_.push_back(value);
    return found->second;
  }
  Json json() const { return values_; }

 private:
  std::map<Value, std::size_t> numbers_;
  std::vector<Value> values_;
};

std::size_t total(const Bytes& bytes) { return std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}); }

double rounded(double value, int digits) {
  if (value == 0) return 0;
  const double unit = std::pow(10, std::floor(std::log10(std::abs(value))) + 1 - digits);
  return unit < 1 ? std::round(value / unit) / std::round(1 / unit) : std::round(value / unit) * unit;
}

class Recorder {
 public:
  Recorder(Plan& dev, const Rates& rates) : dev_(dev), rates_(rates) {
    dev.arena.on_change = [this] { memory_changes(); };
    dev.on_work = [this](const Work& work) { add(work); };
    dev.on_cell = [this](const Cell* cell) { begin(cell ? *cell : kBetween); };
  }

  Json json() {
    begin(kBetween);
    Json memory = Json::array();
    for (const Runs& runs : memory_) memory.push_back(runs.json());
    return {{"passes", passes_.json()},
            {"names", names_.json()},
            {"operations", operations()},
            {"lists", lists_.json()},
            {"cells",
             {{"pass", pass_.json()},
              {"layer", layer_.json()},
              {"begin", begin_.json()},
              {"end", end_.json()},
              {"list", list_.json()},
              {"memory", memory}}}};
  }

 private:
  static constexpr Cell kBetween = {"", -1, {}};

  Json operations() const {
    Json all = operations_.json();
    for (Json& operation : all)
      for (Json& number : operation)
        if (const double x = number; x == std::round(x)) number = static_cast<std::int64_t>(x);
    return all;
  }

  // Ends the cell before it. Cells without operations are left out.
  void begin(const Cell& cell) {
    if (!open_.empty()) {
      pass_.add(static_cast<std::int64_t>(passes_.number(cell_.pass)));
      layer_.add(cell_.layer), begin_.add(cell_.rows.begin), end_.add(cell_.rows.end);
      list_.add(static_cast<std::int64_t>(lists_.number(open_)));
      for (std::size_t kind = 0; kind < memory_.size(); ++kind)
        memory_[kind].add(static_cast<std::int64_t>(at_start_[kind]));
      open_.clear();
    }
    cell_ = cell;
  }

  // An operation has what is allocated for it before it is counted.
  void memory_changes() {
    const Bytes& now = dev_.arena.by_kind();
    const bool grows = total(now) > std::exchange(last_, total(now));
    if (grows && last_ > total(most_)) most_ = now;
  }

  void add(const Work& work) {
    const Bytes now = dev_.arena.by_kind(), bytes = total(most_) > total(now) ? most_ : now;
    most_ = {};
    if (open_.empty()) at_start_ = bytes;
    Usage cost;
    cost.count(work);
    const Seconds seconds = predict(cost, rates_);
    const double copied = std::accumulate(dev_.far_traffic().begin(), dev_.far_traffic().end(), 0.0);
    std::vector<double> operation = {static_cast<double>(names_.number(std::string(work.name))), work.flops,
                                     rounded(1e6 * (seconds.compute + seconds.sent), 5), work.sent,
                                     copied - std::exchange(copied_, copied)};
    for (std::size_t kind = 0; kind < bytes.size(); ++kind) {
      if (bytes[kind] == at_start_[kind]) continue;
      operation.push_back(static_cast<double>(kind));
      operation.push_back(static_cast<double>(bytes[kind]) - static_cast<double>(at_start_[kind]));
    }
    open_.push_back(operations_.number(operation));
  }

  Plan& dev_;
  const Rates& rates_;
  Distinct<std::string> passes_, names_;
  Distinct<std::vector<double>> operations_;
  Distinct<std::vector<std::size_t>> lists_;
  Runs pass_, layer_, begin_, end_, list_;
  ByKind<Runs> memory_;
  Cell cell_ = kBetween;
  std::vector<std::size_t> open_;  // the operations of this cell
  Bytes at_start_{}, most_{};      // most_: since the last operation
  std::size_t last_ = 0;
  double copied_ = 0;
};

}  // namespace

Json timeline(const StepSettings& settings, Index rows, const Schedule& schedule, const Rates& rates) {
  StepSettings s = settings;
  s.micro_batches = std::min(s.micro_batches, 2 * s.ranks.streams());  // all later rounds are like the second
  return with_types(s, [&]<class T, class G>() {
    Plan dev(s.device, s.tile);
    Recorder recorder(dev, rates);
    Trainer<Plan, T, G> trainer(dev, s.config, rows, {s.optimizer, s.places}, s.objective, s.ranks);
    trainer.plan_step(s.micro_batches, schedule, s.optimizer, s.documents);
    return recorder.json();
  });
}

}  // namespace streambp
