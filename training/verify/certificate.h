// What holds for a model, data and settings. A line compares two ways to compute the same numbers: either every bit is
// equal, or they differ by rounding, and the line says by how much and why; else it fails. What cannot be compared here is
// named, with the reason.
#pragma once

#include <omp.h>

#include "data/files/checkpoint.h"
#include "kernels/base/far_file.h"
#include "kernels/base/inner_loops.h"
#include "training/engine.h"
#include "training/merge.h"
#include "training/plan.h"
#include "training/verify/gradient_check.h"

namespace streambp {

// Rows of a batch that are whole documents.
inline Batch part_of(const Batch& all, Rows rows) {
  Batch part;
  const auto copy = [&](const auto& from, auto& to) {
    if (!from.empty()) to.assign(from.begin() + rows.begin, from.begin() + rows.end);
  };
  copy(all.tokens, part.tokens), copy(all.targets, part.targets), copy(all.positions, part.positions);
  copy(all.key_begin, part.key_begin), copy(all.reference, part.reference), copy(all.old, part.old);
  copy(all.advantages, part.advantages);
  for (std::int32_t& first : part.key_begin) first -= static_cast<std::int32_t>(rows.begin);
  return part;
}

inline std::vector<double> end_to_end(const std::vector<std::vector<double>>& parts) {
  std::vector<double> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// max |a - b|; infinite if one of them is not finite
inline double largest_distance(const std::vector<double>& a, const std::vector<double>& b) {
  require(a.size() == b.size(), a.size(), " numbers instead of ", b.size());
  double largest = 0;
#pragma omp parallel for reduction(max : largest)
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
    std::function<void(Engine&)> fill;   // with the weights
    std::function<Difference()> oracle;  // its distance from the float64 gradient
    double rounding_limit;
    fs::path model = {}, adapter = {};       // directories, if there are any
    std::optional<ModelLayout> layout = {};  // of checkpoints; nothing: they cannot be saved
  };
  explicit Certificate(Subject subject) : s_(std::move(subject)) {}

  enum class Verdict { same_bits, rounding, fails, not_run };
  struct Result {
    Verdict verdict;
    std::string note = {};  // why
    double error = 0;
  };
  struct Line {
    const char* name;
    Result (Certificate::*compare)(std::string& what);  // says what it compares
    bool quick = true;                                  // takes less than a minute, even for a model of 0.6B parameters
  };
  static const std::vector<Line>& lines() {
    static const std::vector<Line> all = {
        {"modes", &Certificate::modes},       {"accumulation", &Certificate::accumulation},
        {"packing", &Certificate::packing},   {"oracle", &Certificate::oracle, false},
        {"threads", &Certificate::threads},   {"processors", &Certificate::processors},
        {"far", &Certificate::far},           {"resume", &Certificate::resuming, false},
        {"sampling", &Certificate::sampling}, {"merge", &Certificate::merging, false}};
    return all;
  }

  Result compare(const Line& line, std::string& what) {
    try {
      return (this->*line.compare)(what);
    } catch (const Error& error) {
      return {Verdict::fails, error.what()};
    }
  }

 private:
  Result modes(std::string& what) {
    what = "gradient in full = checkpoint = stream mode, chunks";
    for (const Index chunk : s_.chunks) what += " " + std::to_string(chunk);
    bool equal = bits(schedule_for(Mode::checkpoint, s_.settings, s_.batch.size(), 0)) == first();
    for (const Index chunk : s_.chunks)
      equal &= bits(schedule_for(Mode::stream, s_.settings, s_.batch.size(), chunk)) == first();
    return equal_bits(equal);
  }

  Result oracle(std::string& what) {
    what = "gradient in float64 = an independent oracle";
    engine_.reset();  // its memory
    const auto count = static_cast<std::size_t>(parameter_count(s_.settings.config));
    if (!has_room(4 * sizeof(double) * count)) return not_run("it needs four copies of the model in float64");
    const double error = s_.oracle().relative;
    return {error <= kExact ? Verdict::rounding : Verdict::fails, "", error};
  }

  Result threads(std::string& what) {
    const int threads = omp_get_max_threads(), others = threads == 1 ? 2 : 1;
    what = "gradient with " + std::to_string(threads) + " threads = with " + std::to_string(others);
    if (s_.settings.device == DeviceKind::cuda) return not_run("the gradient is computed on a GPU");
    const Bits expected = first();
    omp_set_num_threads(others);
    const Bits found = bits(streamed(s_.settings));
    omp_set_num_threads(threads);
    return equal_bits(found == expected);
  }

  Result processors(std::string& what) {
    const std::vector<std::string> all = cpu::instruction_sets();
    what = "gradient with the instructions " + join(all);
    if (s_.settings.device == DeviceKind::cuda) return not_run("the gradient is computed on a GPU");
    if (all.size() == 1) return not_run("this processor has no others");
    const Bits expected = first();  // with the last of them
    bool equal = true;
    for (const std::string& instructions : all) {
      cpu::use_instructions(instructions);
      equal &= instructions == all.back() || bits(streamed(s_.settings)) == expected;
    }
    return equal_bits(equal);
  }

  Result packing(std::string& what) {
    const std::vector<Batch> alone = documents();
    what = "log-probs of " + number_of_documents() + ", packed = each alone";
    if (alone.size() < 2) return not_run("there is one document");
    const double distance = largest_distance(log_probs({s_.batch}), log_probs(alone));
    return apart(distance, "a GPU's products depend on the number of rows", s_.settings.device == DeviceKind::cpu);
  }

  Result accumulation(std::string& what) {
    const std::vector<Batch> alone = documents();
    what = "gradient of " + number_of_documents() + ", packed = in " + std::to_string(alone.size()) + " micro-batches";
    if (alone.size() < 2) return not_run("there is one document");
    if (!has_room(sizeof(double) * static_cast<std::size_t>(trained_count(s_.settings.config))))
      return not_run("it needs a copy of the gradient in float64");
    HostTensors packed;
    const Schedule schedule = streamed(s_.settings);
    compute(engine(), {s_.batch}, schedule, [&](std::vector<double> values) { packed.push_back(std::move(values)); });
    std::vector<double> errors, sizes;  // of each tensor: its largest error, its largest entry
    compute(engine(), alone, schedule, [&](const std::vector<double>& values) {
      std::vector<double>& expected = packed[errors.size()];
      errors.push_back(largest_distance(values, expected));
      std::ranges::fill(expected, 0);
      sizes.push_back(largest_distance(values, expected));
    });
    const double smallest = kSmallTensor * std::ranges::max(sizes);
    double largest = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i)
      if (errors[i] > 0) largest = std::max(largest, errors[i] / std::max(sizes[i], smallest));
    return apart(largest, "sums over tokens in another order");
  }

  Result far(std::string& what) {
    StepSettings settings = s_.settings;
    settings.places = {Place::far, Place::near, Place::far, Place::far, Place::far};
    if (settings.config.base == Base::nf4) settings.places.weights = Place::near;
    what = "gradient with weights, gradients and saved inputs in far memory = in near memory";
    const fs::path directory = far_directory({});
    const std::string reason = settings.device == DeviceKind::cpu ? why_not_far(directory) : "";
    if (!reason.empty()) return not_run(directory.string() + " " + reason + "; set TMPDIR");
    Capacity capacity = plan(settings, s_.batch.size(), streamed(settings)).capacity();
    if (capacity.far > free_far_memory(settings.device, {}))
      return not_run("it needs " + std::to_string(capacity.far >> 20) + " MiB there");
    const Bits expected = first();
    engine_.reset();
    const auto engine = engine_with(settings, capacity);
    return equal_bits(bits(*engine, streamed(settings)) == expected);
  }

  Result resuming(std::string& what) {
    what = "weights after two steps = after a step, saved, loaded, and another step";
    if (!s_.layout) return not_run("adapters are saved without their base, which is random");
    StepSettings settings = s_.settings;
    settings.optimizer = OptimizerKind::adamw;
    const Schedule schedule = streamed(settings);
    const Capacity capacity = plan(settings, s_.batch.size(), schedule).capacity();
    const PrivateDirectory directory;
    const OptimizerSettings optimizer{.steps = 2};
    engine_.reset();
    const auto hash = [](Engine& engine) {
      std::uint64_t hash = 0;
      engine.read_weights([&](const std::vector<double>& values) { add_to_hash(hash, values); });
      return hash;
    };
    std::uint64_t uninterrupted;
    {
      const auto engine = engine_with(settings, capacity);
      engine->step({s_.batch}, schedule, optimizer, 1);
      engine->save(directory.path(), *s_.layout, {{"step", 1}});
      engine->step({s_.batch}, schedule, optimizer, 2);
      uninterrupted = hash(*engine);
    }
    const auto engine = make_engine(settings, s_.batch.size(), capacity);
    engine->restore(directory.path() / checkpoint_name(1), *s_.layout);
    engine->step({s_.batch}, schedule, optimizer, 2);
    return equal_bits(hash(*engine) == uninterrupted);
  }

  Result sampling(std::string& what) {
    const GenerationShape shape = generation();
    what = "log-probs of " + std::to_string(shape.completion) + " sampled tokens = of the same tokens in training";
    if (s_.settings.dtype == DType::f64) return not_run("float64 does not generate; use --dtype f32 or bf16");
    const Tokens prompt(s_.batch.tokens.begin(), s_.batch.tokens.begin() + shape.prompt);
    GenerationSettings settings;
    settings.length = shape.completion;
    const Continuation sampled =
        engine().generator(shape)->generate({prompt}, settings, [](std::size_t, const Continuation&) {})[0];
    Batch text;
    Tokens all = prompt;
    all.insert(all.end(), sampled.tokens.begin(), sampled.tokens.end());
    text.append(all);
    const std::vector<double> logps = log_probs({text});
    const double distance = largest_distance(
        sampled.logps, {logps.begin() + shape.prompt - 1, logps.begin() + static_cast<Index>(all.size()) - 1});
    return apart(distance, "a GPU's products depend on the number of rows", s_.settings.device == DeviceKind::cpu);
  }

  Result merging(std::string& what) {
    what = "log-probs with adapters = of the model merged with them";
    if (s_.adapter.empty()) return not_run("no --adapter is given");
    const std::vector<double> with_adapters = log_probs({s_.batch});
    engine_.reset();
    const PrivateDirectory directory;
    ModelLayout layout{s_.model};
    layout.store_as("F32");
    const fs::path merged = directory.path() / "merged";
    create_directory_atomically(merged, merged.string() + ".tmp", [&](const fs::path& files) {
      Merge(s_.model, s_.adapter, s_.settings.config).save(files, layout);
    });
    StepSettings settings = s_.settings;
    settings.config = read_config(merged);
    settings.config.rope_scaling.longest = s_.settings.config.rope_scaling.longest;
    const Schedule schedule = streamed(settings);
    const auto engine = make_engine(settings, s_.batch.size(), plan_evaluation(settings, s_.batch.size(), schedule));
    engine->load(merged);
    return apart(largest_distance(end_to_end(engine->evaluate({s_.batch}, schedule)), with_adapters),
                 "the merged weights are rounded");
  }

  // --- What they need ---

  static Result not_run(const std::string& why) { return {Verdict::not_run, why}; }
  static Result equal_bits(bool equal) {
    return {equal ? Verdict::same_bits : Verdict::fails, equal ? "" : "other bits"};
  }
  // why: the reason for a distance
  Result apart(double error, const char* why, bool exact = false) const {
    if (error == 0) return {Verdict::same_bits};
    return {error <= s_.rounding_limit && !exact ? Verdict::rounding : Verdict::fails, why, error};
  }

  // What is compared bit for bit.
  struct Bits {
    double loss = 0;
    std::vector<double> logps = {};
    std::uint64_t gradient = 0;  // a hash
    bool operator==(const Bits&) const = default;
  };
  static void add_to_hash(std::uint64_t& hash, const std::vector<double>& values) {
    hash = mix(hash ^ XXH3_64bits(values.data(), values.size() * sizeof(double)));
  }
  Bits bits(Engine& engine, const Schedule& schedule) {
    Bits result;
    const auto [loss, logps] = compute(
        engine, {s_.batch}, schedule, [&](const std::vector<double>& values) { add_to_hash(result.gradient, values); });
    result.loss = loss, result.logps = logps;
    return result;
  }
  Bits bits(const Schedule& schedule) { return bits(engine(), schedule); }

  // In full mode.
  const Bits& first() {
    if (!first_) first_ = bits(schedule_for(Mode::full, s_.settings, s_.batch.size(), 0));
    return *first_;
  }

  // Calls f with the gradient of each tensor. Returns the loss and the log-probs.
  static std::pair<double, std::vector<double>> compute(Engine& engine, const std::vector<Batch>& batches,
                                                        const Schedule& schedule, const Engine::OnTensor& f) {
    std::vector<double> logps;
    const Engine::OnLogps add = [&](std::size_t, const std::vector<double>& some) {
      logps.insert(logps.end(), some.begin(), some.end());
    };
    const double loss = engine.accumulate(batches, schedule, add).loss;
    require(std::isfinite(loss), "the loss is not finite");
    engine.read_gradient(f);
    engine.release_gradient();
    return {loss, logps};
  }

  std::vector<double> log_probs(const std::vector<Batch>& batches) {
    return end_to_end(engine().evaluate(batches, streamed(s_.settings)));
  }

  std::string number_of_documents() const { return std::to_string(s_.batch.documents().size()) + " documents"; }

  // One document, or a pair, in each batch.
  std::vector<Batch> documents() const {
    const std::vector<Rows> rows = s_.batch.documents();
    const std::size_t together = s_.settings.objective.kind == ObjectiveKind::dpo ? 2 : 1;
    std::vector<Batch> result;
    for (std::size_t d = 0; d < rows.size(); d += together)
      result.push_back(part_of(s_.batch, {rows[d].begin, rows[d + together - 1].end}));
    return result;
  }

  // For everything that needs no other settings.
  Engine& engine() {
    if (engine_) return *engine_;
    StepSettings largest = s_.settings;
    largest.micro_batches = std::ssize(documents());
    Capacity capacity(0);
    for (const Mode mode : kModes) {
      for (const Index chunk : s_.chunks) {
        const Schedule schedule = schedule_for(mode, largest, s_.batch.size(), chunk);
        for (const StepSettings& settings : {s_.settings, largest})
          capacity.near = std::max(capacity.near, plan_run(settings, s_.batch.size(), schedule, generation()).near);
      }
    }
    engine_ = engine_with(s_.settings, capacity);
    return *engine_;
  }

  std::unique_ptr<Engine> engine_with(const StepSettings& settings, const Capacity& capacity) const {
    auto engine = make_engine(settings, s_.batch.size(), capacity);
    s_.fill(*engine);
    return engine;
  }

  Schedule streamed(const StepSettings& settings) const {
    return schedule_for(Mode::stream, settings, s_.batch.size(), s_.chunks.front());
  }

  bool has_room(std::size_t bytes) const { return bytes < free_memory(DeviceKind::cpu); }

  // One sequence, which begins like the first document.
  GenerationShape generation() const {
    if (s_.settings.dtype == DType::f64) return {};
    const Index room = std::min(s_.batch.size(), kSampled + 8),
                prompt = std::max<Index>(1, std::min<Index>(8, room / 2));
    return {1, room, kTile, 1, prompt, room - prompt};
  }

  static constexpr double kExact = 1e-10;
  static constexpr Index kSampled = 24;  // tokens

  Subject s_;
  std::unique_ptr<Engine> engine_;
  std::optional<Bits> first_;
};

}  // namespace streambp
