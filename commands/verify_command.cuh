// streambp verify: a proof, on this machine, that StreamBP's gradient is the full-memory gradient.
#pragma once

#include "commands/device_options.cuh"
#include "commands/objective_options.cuh"
#include "data/documents/packing.cuh"
#include "data/documents/tokenised.cuh"
#include "data/files/checkpoint.cuh"
#include "training/verify/gradient_check.cuh"

namespace streambp {

class VerifyCommand {
 public:
  explicit VerifyCommand(CLI::App& parent) {
    CLI::App& app = *parent.add_subcommand(
        "verify",
        "Prove that StreamBP's gradient is the full-memory gradient.\n\n"
        "Computes the gradient of random documents in full, checkpoint and stream mode, and compares every parameter:\n"
        "bit for bit with full mode, and in size with float64. Exits with 0 only if every bit is equal and the error "
        "is\n"
        "within 1e-5 in float32, 1e-10 in float64, 0.1 in bfloat16 (largest difference of a tensor over its largest\n"
        "entry). On a GPU the float64 gradient still comes from the CPU.\n\n"
        "  streambp verify --family qwen3 --dtype f64 --reference\n"
        "  streambp verify --objective dpo --reference\n"
        "  streambp verify --model Qwen3-0.6B --data chats.jsonl --length 2000 --chunk 256 1024");
    model.add_to(app, "--model", true);
    device.add_to(app, {"auto", "f32", "f64", "bf16"}, {});
    objectives.add_to(app);
    app.add_option("--length", length, "Tokens of the stream, in documents of unequal length")
        ->check(CLI::Range(4, 1 << 24))
        ->capture_default_str();
    app.add_option("--documents", documents, "Documents in the stream")
        ->check(CLI::Range(1, 1 << 20))
        ->default_str("3; for pairs 4");
    app.add_option("--chunk", stream_chunks,
                   "One or more chunks for stream mode (default: 256 512 768; on a GPU 2048 4096)");
    app.add_option("--tile", tile,
                   "On a GPU: rows whose weight gradients are added up at a time; smaller than 2048 only for tests")
        ->capture_default_str();
    app.add_option(
        "--data", data,
        "Take the documents, or of dpo the pairs, from these files, for a --model directory with a tokenizer; "
        "see tokenize. What dpo and grpo need besides tokens is made up");
    app.add_option("--chat", data_options.chat, "Layout of conversations in --data: " + Chat::names());
    app.add_option("--tokens", tokens_file, "Take the tokens from this file (little-endian int32), as one document");
    app.add_option("--save-gradient", gradient_file,
                   "Write the gradient of the last stream run to this safetensors file, in float32");
    app.add_option("--seed", seed, "Of weights, where there is no --model directory, and of tokens")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    app.add_flag("--reference", with_reference,
                 "Compare with the independent double-precision reference as well: slow, plain, and in memory that "
                 "grows with length squared");
    app.add_option("--json", json_file, "Write the table to this JSON file as well");
    app.callback([this] {
      gpu = device.gpu();
      if (!gpu) return device.dtype == "f64" ? run<Cpu, double>() : run<Cpu, float>();
#ifdef STREAMBP_CUDA
      return device.dtype == "f32" ? run<Cuda, float>() : run<Cuda, BFloat16>();
#endif
    });
  }

  bool failed() const { return failed_; }

 private:
  template <class Device, class T>
  void run() {
    constexpr bool half = std::is_same_v<T, BFloat16>;
    const std::string dtype = half ? "bf16" : sizeof(T) == 4 ? "f32" : "f64";
    if (!gpu) tile = kTile;
    require(tile > 0 && tile % kTile == 0, "--tile ", tile, " is not a multiple of ", kTile, " rows");
    if (stream_chunks.empty())
      stream_chunks = gpu ? std::vector<Index>{tile, 2 * tile} : std::vector<Index>{256, 512, 768};
    for (Index chunk : stream_chunks) check_chunk(chunk, tile);
    const Objective objective = objectives.settings(length);
    if (objective.kind == ObjectiveKind::dpo && objectives.app->count("--documents") == 0) documents = 4;
    require(data.empty() || tokens_file.empty(), "--data and --tokens both say what the tokens are; leave out one");
    if (fs::is_directory(model.model)) model.model = model_directory(model.model);
    const bool random = data.empty() && tokens_file.empty();
    Batch batch = tokens_file.empty() ? Batch() : read_tokens();
    if (!tokens_file.empty()) length = batch.size();
    const Config config = model.config(length);
    if (!data.empty()) batch = read_data(config);
    if (random) batch = random_batch(config);
    length = batch.size(), documents = static_cast<Index>(batch.documents().size());
    require(objective.kind != ObjectiveKind::dpo || documents % 2 == 0,
            "the documents of --objective dpo are pairs, and ", "there are ", documents,
            "; give an even number of --documents");
    require(config.positions == Positions::rope || length <= config.max_length * documents, "--length ", length, " in ",
            documents, " documents is longer than the ", config.max_length,
            " positions that the model has learned; give more --documents");
    const fs::path weights = fs::is_directory(model.model) ? fs::path(model.model) : fs::path();
    auto fill = [&](auto& dev, auto& m) {
      if (weights.empty()) {
        initialise(dev, m, seed, 0.05);
      } else {
        load_model(dev, weights, m);
      }
      if (half) round_weights(dev, m);
    };
    const double tolerance = half ? 0.1 : sizeof(T) == 4 ? 1e-5 : 1e-10;
    std::printf("%s%s\n%s on %s, %ld tokens in %ld documents, %ld targets, objective %s\n\n", describe(config).c_str(),
                weights.empty() ? ", random weights" : (", weights of " + weights.string()).c_str(), dtype.c_str(),
                device_name(gpu).c_str(), length, documents, batch.target_count(), objectives.objective.c_str());
    std::fflush(stdout);

    TextTable table({"mode", "chunk", "loss", "memory", "seconds", "largest error", "in", "bits"});
    Json json = {{"config", config_to_json(config)},
                 {"dtype", dtype},
                 {"objective", objectives.objective},
                 {"length", length},
                 {"documents", documents},
                 {"tolerance", tolerance},
                 {"runs", Json::array()}};

    progress("full, float64");
    const Schedule full = Schedule::full(length);
    if (objective.kind != ObjectiveKind::sft) {
      batch = with_objective_data(batch, run_gradient<Cpu, double>(config, batch, full, fill).logp);
    }
    GradientRun truth = run_gradient<Cpu, double>(config, batch, full, fill, objective);
    std::string truth_name = "full mode in float64";
    if (with_reference) {
      progress("reference");
      truth_name = "the independent reference in float64";
      const auto start = std::chrono::steady_clock::now();
      const reference::Result naive = reference_gradient(config, batch, fill, objective);
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      table.add({"reference", "", format("%.12f", naive.loss), "", format("%.2f", seconds), "", "", ""});
      truth.gradient = HostGradient(truth.gradient, naive.gradient);
      truth.loss = naive.loss;
    }

    std::optional<GradientRun> first;
    auto verify_mode = [&](Mode mode, Index chunk) {
      progress(mode == Mode::stream ? format("stream %ld", chunk) : name(mode));
      const Schedule schedule = schedule_for(mode, config, length, chunk, tile);
      const GradientRun run = [&] {
        if constexpr (std::is_same_v<Device, Cpu>) {
          return run_gradient<Cpu, T>(config, batch, schedule, fill, objective);
        } else {
          return run_gradient<Device, T>(config, batch, schedule, fill, objective, tile);
        }
      }();
      if (mode == Mode::stream) last_stream = run.gradient;
      const Difference error = run.gradient.difference(truth.gradient);
      const double loss_error = std::abs(run.loss - truth.loss) / std::max(std::abs(truth.loss), 1e-300);
      const bool equal =
          !first || (run.gradient == first->gradient && run.loss == first->loss && run.logp == first->logp);
      const bool exact_plan = run.peak == run.planned;
      if (!(error.relative <= tolerance && loss_error <= tolerance) || !equal || !exact_plan) failed_ = true;
      table.add({name(mode), mode == Mode::stream ? std::to_string(chunk) : "all", format("%.12f", run.loss),
                 human_bytes(run.peak) + (exact_plan ? "" : " (planned " + human_bytes(run.planned) + ")"),
                 format("%.2f", run.seconds), format("%.1e", error.relative), error.tensor,
                 !first  ? "as full"
                 : equal ? "all equal"
                         : "DIFFER"});
      json["runs"].push_back({{"mode", name(mode)},
                              {"chunk", mode == Mode::stream ? chunk : length},
                              {"loss", run.loss},
                              {"peak", run.peak},
                              {"planned", run.planned},
                              {"seconds", run.seconds},
                              {"error", error.relative},
                              {"tensor", error.tensor},
                              {"bits_equal", equal}});
      if (!first) first = run;
    };
    verify_mode(Mode::full, 0);
    verify_mode(Mode::checkpoint, 0);
    for (Index chunk : stream_chunks) verify_mode(Mode::stream, chunk);
    progress("");
    if (!gradient_file.empty()) save_gradient(config);

    table.print();
    std::printf("\nErrors are against %s; tolerance %.0e.\n", truth_name.c_str(), tolerance);
    std::printf(failed_ ? "FAILED: see the table.\n"
                        : "Verified: every gradient is within the tolerance, and every bit the same in all modes.\n");
    json["reference"] = with_reference;
    json["verified"] = !failed_;
    if (!json_file.empty()) write_file_atomically(json_file, json.dump(2) + "\n");
  }

  // Every number becomes one that bfloat16 can hold, so that all types start from the same weights.
  template <class Device, class T>
  static void round_weights(Device& dev, Model<T>& m) {
    for (auto& e : table(m.config, m.weights)) {
      std::vector<T> values = to_host(dev, *e.matrix);
      for (T& x : values) x = static_cast<T>(static_cast<float>(BFloat16(static_cast<float>(x))));
      dev.upload(*e.matrix, values.data());
    }
  }

  Batch read_tokens() const {
    const std::string bytes = read_file(tokens_file, std::size_t{1} << 26);
    std::vector<std::int32_t> tokens(bytes.size() / 4);
    require(tokens.size() >= 2 && bytes.size() % 4 == 0, tokens_file, ": ", bytes.size(),
            " bytes are not two or more tokens of 4 bytes each");
    std::memcpy(tokens.data(), bytes.data(), bytes.size());
    Batch batch;
    batch.append(tokens);
    return batch;
  }

  // Documents in the order of the data, until there are `length` tokens.
  Batch read_data(const Config& config) {
    require(fs::is_directory(model.model), "--data goes with --model DIR, a model directory with a tokenizer");
    const TokenFile file = tokenised({data.begin(), data.end()}, model.model, data_options, cache_directory());
    file.require_vocabulary(config.vocab);
    const Index longest = config.positions == Positions::learned ? config.max_length : length;
    const bool pairs = objectives.objective == "dpo";
    if (objectives.objective != "grpo" || file.preferences()) objectives.require_kind(file);
    Batch batch;
    for (Index d = 0; d < file.documents() && batch.size() + 2 <= length; ++d) {
      const Index room = pairs ? length / 2 : length - batch.size();  // of a pair both sides are to have some
      if (pairs && d % 2 == 0 && batch.size() > 0 && batch.size() + file.length(d) + file.length(d + 1) > length) break;
      const PackedPiece piece{d, 0, std::min({file.length(d), longest, room})};
      Batch alone;
      append(alone, file, piece);
      const bool nothing_left = alone.target_count() == 0;  // to learn, of a completion that is cut
      if (objectives.objective != "grpo" || !nothing_left) append(batch, file, piece);
    }
    require(batch.target_count() > 0, data[0], ": nothing is to be learned in its first ", length,
            " tokens; give a larger --length");
    return batch;
  }

  void save_gradient(const Config& config) const {
    Tensors<float> tensors(config);
    Plan size;
    allocate(size, table(config, tensors), Kind::gradients);
    Cpu host(size.arena.peak());
    std::size_t i = 0;
    for (auto& e : table(config, tensors)) {
      const std::vector<double>& values = last_stream->values[i++];
      *e.matrix = host.allocate<float>(e.parameter.rows, e.parameter.cols, Kind::gradients);
      host.upload(*e.matrix, std::vector<float>(values.begin(), values.end()).data());
    }
    SafetensorsWriter writer(gradient_file, {{"format", "pt"}});
    write_tensors(host, writer, "", table(config, tensors));
    writer.finish();
  }

  // Documents of unequal length with random tokens; the first tokens of each have no target, like a prompt.
  Batch random_batch(const Config& config) const {
    require(documents * 2 <= length, "--documents ", documents, " of two tokens or more do not fit --length ", length);
    const Random random(seed, 77);
    Batch batch;
    std::uint64_t index = 0;
    auto token = [&] {
      return static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(config.vocab), index++));
    };
    Index begin = 0;
    for (Index i = 0; i < documents; ++i) {
      // ends at quadratic fractions, so that later documents are longer; but each has two tokens or more
      const double fraction = static_cast<double>(i + 1) / static_cast<double>(documents);
      Index end = i + 1 == documents
                      ? length
                      : static_cast<Index>(static_cast<double>(length) * (0.5 * fraction + 0.5 * fraction * fraction));
      if (config.positions == Positions::learned) end = length * (i + 1) / documents;
      end = std::clamp(end, begin + 2, length - 2 * (documents - 1 - i));
      std::vector<std::int32_t> document;
      for (Index t = begin; t < end; ++t) document.push_back(token());
      batch.append(document, token());
      for (Index t = begin; t < begin + (end - begin) / 8; ++t) batch.targets[static_cast<std::size_t>(t)] = -1;
      begin = end;
    }
    return batch;
  }

  static void progress(const std::string& what) {
    if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\r\033[K%s", what.c_str());
  }

  ModelOptions model;
  DeviceOptions device;
  ObjectiveOptions objectives;
  bool gpu = false;
  Index length = 1200, documents = 3, tile = kGpuTile;
  std::vector<Index> stream_chunks;
  std::optional<HostGradient> last_stream;
  std::vector<std::string> data;
  DataOptions data_options;
  std::string tokens_file, gradient_file, json_file;
  std::uint64_t seed = 1;
  bool with_reference = false, failed_ = false;
};

}  // namespace streambp
