// What holds for a model, data and settings. A line compares two ways to compute the same numbers: either every bit is
// equal, or they differ by rounding, and the line says by how much and why; else it fails. What cannot be compared here is
// named, with the reason.
#pragma once

#include <omp.h>

#include "data/files/checkpoint.h"
#include "data/files/merge.h"
#include "kernels/base/far_file.h"
#include "kernels/base/inner_loops.h"
#include "referee/gradient_check.h"
#include "training/engine.h"
#include "training/plan.h"

namespace streambp {

// max |a - b|; infinite if one of them is not finite
inline double largest_distance(const std::vector<double>& a, const std::vector<double>& b) {
  require(a.size() == b.size(), a.size(), " log-probs instead of ", b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double distance = std::abs(a[i] - b[i]);
    largest = std::max(largest, std::isfinite(distance) ? distance : INFINITY);
  }
  return largest;
}

class Certificate {
 public:
  struct Subject {
    StepSettings settings;
    Batch batch;  // with the data of the objective
    std::vector<Index> chunks;
    std::function<void(Engine&)> fill;       // with the weights
    std::function<double()> oracle;          // its distance from the float64 gradient
    double rounding_limit;                   // of a gradient
    bool quick = false;                      // leave out what takes minutes for a large model
    fs::path model = {}, adapter = {};       // directories, if there are any
    std::optional<ModelLayout> layout = {};  // of checkpoints; nothing: they cannot be saved
  };
  explicit Certificate(Subject subject) : s_(std::move(subject)), rows_(layout_of(s_.settings.config).rows(s_.batch)) {}

  enum class Verdict { same_bits, rounding, fails, not_run };
  struct Result {
    Verdict verdict;
    std::string note = {};  // why
    double error = 0;
  };
  struct Line {
    const char* name;
    Result (Certificate::*compare)(std::string& what);  // says what it compares
  };
  static const std::vector<Line>& lines() {
    static const std::vector<Line> all = {
        {"modes", &Certificate::modes},       {"accumulation", &Certificate::accumulation},
        {"packing", &Certificate::packing},   {"oracle", &Certificate::oracle},
        {"threads", &Certificate::threads},   {"processors", &Certificate::processors},
        {"far", &Certificate::far},           {"resume", &Certificate::resuming},
        {"sampling", &Certificate::sampling}, {"merge", &Certificate::merging}};
    return all;
  }

  Result compare(const Line& line, std::string& what) { return (this->*line.compare)(what); }

 private:
  Result modes(std::string& what) {
    what = "gradient in full = checkpoint = stream mode, chunk";
    for (const Index chunk : s_.chunks) what += " " + std::to_string(chunk);
    bool equal = true;
    const auto compare = [&](Mode mode, Index chunk) {
      const Bits found = bits(schedule_for(mode, s_.settings, rows_, chunk));
      equal = equal && found == first();
    };
    compare(Mode::full, 0), compare(Mode::checkpoint, 0);
    for (std::size_t i = 1; i < s_.chunks.size(); ++i) compare(Mode::stream, s_.chunks[i]);
    return equal_bits(equal);
  }

  Result accumulation(std::string& what) {
    const std::vector<Batch> alone = units();
    what = "gradient of " + several(alone) + ", packed = in " + std::to_string(alone.size()) + " micro-batches";
    if (alone.size() < 2) return not_run("there is one of them");
    if (s_.settings.config.balance() > 0) return not_run("a loss balances the experts of each micro-batch");
    if (!has_room(sizeof(double) * static_cast<std::size_t>(trained_count(s_.settings.config))))
      return not_run("it needs a copy of the gradient in float64");
    first();  // is finite
    HostTensors packed;
    compute(engine(), {s_.batch}, streamed(), [&](std::vector<double> values) { packed.push_back(std::move(values)); });
    const std::vector<Parameter> parameters = trained_parameters(s_.settings.config);
    DifferenceOfTensors difference;
    compute(engine(), alone, streamed(), [&, i = std::size_t{0}](const std::vector<double>& values) mutable {
      difference.add(parameters[i].name, values, packed[i]);
      packed[i++] = {};
    });
    return apart(difference.worst().relative, "sums over tokens in another order", s_.rounding_limit);
  }

  Result packing(std::string& what) {
    const std::vector<Batch> alone = units();
    what = "log-probs of " + several(alone) + ", packed = each alone";
    if (alone.size() < 2) return not_run("there is one of them");
    return equal_log_probs(log_probs(engine(), {s_.batch}), log_probs(engine(), alone));
  }

  Result oracle(std::string& what) {
    what = "gradient in float64 = an independent oracle";
    if (s_.quick) return takes_minutes();
    const auto count = static_cast<std::size_t>(parameter_count(s_.settings.config));
    engine_.reset();  // its memory
    if (!has_room(4 * sizeof(double) * count)) return not_run("it needs four copies of the model in float64");
    return apart(s_.oracle(), "rounding of float64", kExact);
  }

  Result threads(std::string& what) {
    const int threads = omp_get_max_threads(), others = threads == 1 ? 2 : 1;
    what = "gradient with OMP_NUM_THREADS=" + std::to_string(threads) + " = with " + std::to_string(others);
    if (s_.settings.device == DeviceKind::cuda) return not_run("the gradient is computed on a GPU");
    const Bits expected = first();
    const AtEnd restore{[=] { omp_set_num_threads(threads); }};
    omp_set_num_threads(others);
    return equal_bits(bits(streamed()) == expected);
  }

  Result processors(std::string& what) {
    std::vector<std::string> all = cpu::instruction_sets();
    what = "gradient with the instructions " + join(all);
    if (s_.settings.device == DeviceKind::cuda) return not_run("the gradient is computed on a GPU");
    if (all.size() == 1) return not_run("this processor has no others");
    const AtEnd restore{[best = all.back()] { cpu::use_instructions(best); }};
    const Bits expected = first();  // with the best ones
    all.pop_back();
    bool equal = true;
    for (const std::string& instructions : all) {
      cpu::use_instructions(instructions);
      const Bits found = bits(streamed());
      equal = equal && found == expected;
    }
    return equal_bits(equal);
  }

  Result far(std::string& what) {
    StepSettings settings = s_.settings;
    settings.places = {Place::far, Place::near, Place::far, Place::far};
    settings.kept = KeptSets().with(Part::attention, Place::far).with(Part::gate_up);
    const bool four_bits = settings.config.in_4_bits();
    if (four_bits) settings.places.weights = Place::near;
    what = std::string("gradient with ") + (four_bits ? "" : "weights, ") +
           "gradients, saved inputs and attention's outputs in far memory = in near memory";
    const Bits expected = first();
    return on_disk([&] {
      const fs::path directory = far_directory({});
      const std::string reason = settings.device == DeviceKind::cpu ? why_not_far(directory) : "";
      require(reason.empty(), directory.string(), " ", reason, "; set TMPDIR");
      const Schedule schedule = schedule_for(Mode::stream, settings, rows_, s_.chunks.front());
      const Capacity capacity = plan(settings, rows_, schedule).capacity();
      require(capacity.far <= free_far_memory(settings.device, {}), "it needs ", capacity.far >> 20, " MiB there");
      engine_.reset();
      return equal_bits(bits(*engine_with(settings, capacity), schedule) == expected);
    });
  }

  Result resuming(std::string& what) {
    what = "weights after two steps = after a step, saved, loaded, and another step";
    if (!s_.layout) return not_run("adapters are saved without their base, which is random");
    if (s_.quick) return takes_minutes();
    StepSettings settings = s_.settings;
    if (settings.optimizer == OptimizerKind::none) settings.optimizer = OptimizerKind::adamw;
    const Capacity capacity = plan(settings, rows_, streamed()).capacity();
    const OptimizerSettings optimizer{.steps = 2};
    const auto hash = [](Engine& engine) {
      std::uint64_t hash = 0;
      engine.read_weights([&](const std::vector<double>& values) { add_to_hash(hash, values); });
      return hash;
    };
    return on_disk([&] {
      const PrivateDirectory directory;
      engine_.reset();
      auto engine = engine_with(settings, capacity);
      engine->step({s_.batch}, streamed(), optimizer, 1);
      engine->save(directory.path(), *s_.layout, {{"step", 1}});
      engine->step({s_.batch}, streamed(), optimizer, 2);
      const std::uint64_t uninterrupted = hash(*engine);
      engine.reset();
      engine = make_engine(settings, rows_, capacity);
      engine->restore(directory.path() / checkpoint_name(1), *s_.layout);
      engine->step({s_.batch}, streamed(), optimizer, 2);
      return equal_bits(hash(*engine) == uninterrupted);
    });
  }

  Result sampling(std::string& what) {
    what = "log-probs of sampled tokens = of the same tokens in training";
    const GenerationShape shape = generation();
    if (shape.slots == 0) return not_run("float64 does not generate; use --dtype f32 or bf16");
    Tokens text(s_.batch.tokens.begin(), s_.batch.tokens.begin() + shape.prompt);
    GenerationSettings settings;
    settings.length = shape.completion;
    const Continuation sampled =
        engine().generator(shape)->generate({text}, settings, [](std::size_t, const Continuation&) {})[0];
    text.insert(text.end(), sampled.tokens.begin(), sampled.tokens.end());
    Batch batch;
    batch.append(text);
    const std::vector<double> logps = log_probs(engine(), {batch});
    return equal_log_probs(sampled.logps, {logps.begin() + shape.prompt - 1, logps.end() - 1});
  }

  Result merging(std::string& what) {
    what = "log-probs with adapters = of the model merged with them";
    if (s_.adapter.empty()) return not_run("no --adapter is given");
    if (s_.quick) return takes_minutes();
    // In bfloat16, a weight loses most of what small adapters add to it.
    StepSettings settings = s_.settings;
    if (settings.dtype == DType::bf16)
      settings.dtype = DType::f32, settings.wide_gradient = false, what += ", in float32";
    const auto log_probs_of = [&](const Config& config, const std::function<void(Engine&)>& fill) {
      settings.config = config;
      const auto engine = make_engine(settings, rows_, plan_evaluation(settings, rows_, streamed()));
      fill(*engine);
      return log_probs(*engine, {s_.batch});
    };
    return on_disk([&] {
      engine_.reset();
      const std::vector<double> with_adapters = log_probs_of(s_.settings.config, s_.fill);
      const PrivateDirectory directory;
      const fs::path merged = directory.path() / "merged";
      ModelLayout layout{s_.model};
      layout.store_as("F32");
      create_directory_atomically(merged, merged.string() + ".tmp", [&](const fs::path& files) {
        Merge(s_.model, s_.adapter, s_.settings.config).save(files, layout);
      });
      Config config = read_config(merged);
      config.rope_scaling.longest = s_.settings.config.rope_scaling.longest;
      const auto of_merged = log_probs_of(config, [&](Engine& engine) { engine.load(merged); });
      return apart(largest_distance(of_merged, with_adapters), "the merged weights are rounded", 1e-3);
    });
  }

  // --- What they need ---

  struct AtEnd {
    std::function<void()> restore;
    ~AtEnd() { restore(); }
  };

  static Result not_run(const std::string& why) { return {Verdict::not_run, why}; }
  static Result takes_minutes() { return not_run("it takes minutes; use --certificate full"); }
  static Result equal_bits(bool equal) {
    return equal ? Result{Verdict::same_bits} : Result{Verdict::fails, "other bits"};
  }
  static Result apart(double error, const char* why, double limit) {
    if (error == 0) return {Verdict::same_bits};
    return {error <= limit ? Verdict::rounding : Verdict::fails, why, error};
  }
  // On a GPU, products depend on the number of rows.
  Result equal_log_probs(const std::vector<double>& a, const std::vector<double>& b) const {
    const bool cpu = s_.settings.device == DeviceKind::cpu;
    return apart(largest_distance(a, b), cpu ? "" : "a GPU's products depend on the number of rows", cpu ? 0 : 0.1);
  }
  // Without a disk, or without space on it, there is nothing to compare.
  template <class F>
  static Result on_disk(F&& compare) {
    try {
      return compare();
    } catch (const Error& error) {
      return not_run(error.what());
    }
  }

  // What is compared bit for bit.
  struct Bits {
    double loss = 0;
    std::vector<double> logps = {};
    std::uint64_t gradient = 0;  // a hash
    bool finite = true;
    bool operator==(const Bits&) const = default;
  };
  static void add_to_hash(std::uint64_t& hash, const std::vector<double>& values) {
    hash = mix(hash ^ XXH3_64bits(values.data(), values.size() * sizeof(double)));
  }
  Bits bits(Engine& engine, const Schedule& schedule) {
    Bits result;
    const StepRun run = compute(engine, {s_.batch}, schedule, [&](const std::vector<double>& values) {
      add_to_hash(result.gradient, values);
      result.finite = result.finite && std::ranges::all_of(values, [](double x) { return std::isfinite(x); });
    });
    result.loss = run.loss, result.logps = run.logp;
    result.finite = result.finite && std::isfinite(result.loss);
    return result;
  }
  Bits bits(const Schedule& schedule) { return bits(engine(), schedule); }

  // In stream mode, with the first chunk.
  const Bits& first() {
    if (!first_) first_ = bits(streamed());
    require(first_->finite, "the ", std::isfinite(first_->loss) ? "gradient" : "loss",
            " is not finite, so there is nothing to compare");
    return *first_;
  }

  // Calls f with the gradient of each tensor.
  static StepRun compute(Engine& engine, const std::vector<Batch>& batches, const Schedule& schedule,
                         const Engine::OnTensor& f) {
    StepRun run = run_step(engine, batches, schedule);
    engine.read_gradient(f);
    engine.release_gradient();
    return run;
  }

  std::vector<double> log_probs(Engine& engine, const std::vector<Batch>& batches) const {
    std::vector<double> all;
    for (const auto& some : engine.evaluate(batches, streamed())) all.insert(all.end(), some.begin(), some.end());
    return all;
  }

  // What can be a batch alone: a document, for DPO a pair of them.
  std::vector<Batch> units() const {
    const std::vector<Rows> rows = s_.batch.documents();
    const std::size_t together = pairs() ? 2 : 1;
    std::vector<Batch> result;
    for (std::size_t d = 0; d < rows.size(); d += together)
      result.push_back(part_of(s_.batch, {rows[d].begin, rows[d + together - 1].end}));
    return result;
  }
  bool pairs() const { return s_.settings.objective.kind == ObjectiveKind::dpo; }
  std::string several(const std::vector<Batch>& units) const {
    return std::to_string(units.size()) + (pairs() ? " pair" : " document") + (units.size() == 1 ? "" : "s");
  }

  // For everything that needs no other settings.
  Engine& engine() {
    if (engine_) return *engine_;
    StepSettings accumulated = s_.settings;
    accumulated.micro_batches = std::ssize(units());
    Capacity capacity(0);
    for (const StepSettings& settings : {s_.settings, accumulated}) {
      for (const Mode mode : kModes) {
        for (const Index chunk : s_.chunks) {
          const Schedule schedule = schedule_for(mode, settings, rows_, chunk);
          capacity.near = std::max(capacity.near, plan_run(settings, rows_, schedule, generation()).near);
        }
      }
    }
    engine_ = engine_with(s_.settings, capacity);
    return *engine_;
  }

  std::unique_ptr<Engine> engine_with(const StepSettings& settings, const Capacity& capacity) const {
    auto engine = make_engine(settings, rows_, capacity);
    s_.fill(*engine);
    return engine;
  }

  Schedule streamed() const { return schedule_for(Mode::stream, s_.settings, rows_, s_.chunks.front()); }

  bool has_room(std::size_t bytes) const { return bytes < free_memory(DeviceKind::cpu); }

  // One sequence, which begins like the first document. Float64 does not generate.
  GenerationShape generation() const {
    const Config& c = s_.settings.config;
    Index room = std::min<Index>(s_.batch.size(), 32);
    if (c.positions == Positions::learned) room = std::min(room, c.max_length);
    if (s_.settings.dtype == DType::f64 || room < 2) return {};
    const Index prompt = std::min<Index>(8, room / 2);
    return {1, room, kTile, 1, prompt, room - prompt};
  }

  Subject s_;
  Index rows_;  // of the batch
  std::unique_ptr<Engine> engine_;
  std::optional<Bits> first_;
};

}  // namespace streambp
