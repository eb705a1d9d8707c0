// streambp verify: checks on this machine that StreamBP's gradient is the full-memory gradient.
#include "commands/certificate.h"
#include "commands/command.h"
#include "commands/device_options.h"
#include "commands/rank_options.h"
#include "commands/referee.h"
#include "commands/verify_options.h"
#include "data/files/checkpoint.h"
#include "data/files/hash.h"
#include "referee/gradient_check.h"
#include "training/engine.h"
#include "training/plan.h"

namespace streambp {
namespace {

double rounding_limit(DType dtype) { return dtype == DType::f64 ? kExact : dtype == DType::f32 ? 1e-3 : 0.3; }

constexpr const char* kVerifyDescription =
    "Prove that StreamBP's gradient is the full-memory gradient.\n\n"
    "Computes the gradient of a batch in full, checkpoint and stream mode. Every parameter must have the same bits in "
    "all modes. With --oracle, the float64 gradient must agree with an independent double-precision implementation to "
    "1e-10. The table also shows the rounding error: the largest distance of a tensor from float64, over the tensor's "
    "largest entry. Exits with 0 if everything holds, with 1 if not.\n\n"
    "  streambp verify --family qwen3 --dtype f64 --oracle\n"
    "  streambp verify --model Qwen3-0.6B --data chats.jsonl --length 2000\n"
    "  streambp verify --model Qwen3-0.6B --certificate   all that holds, in one table\n"
    "  mpirun -n 4 streambp verify --sequence-ranks 2     ranks give the same bits\n"
    "  streambp verify --run tuned                        files of a run's checkpoints\n"
    "Another trainer's gradient (docs/defects.md):\n"
    "  streambp verify --model DIR --batch step.*.safetensors --against grad.safetensors\n"
    "  streambp verify --defect micro-batch-means         what a defect does";

class VerifyCommand : public Command {
 public:
  explicit VerifyCommand(CLI::App& app) : Command(app, "verify", kVerifyDescription) {
    input_.add_to(options);
    device_.add_to(options, {"auto", "f32", "f64", "bf16"}, {});
    options.add("--chunk", &chunks_,
                "One or more chunks for stream mode (default: 256 512 768; a certificate 256; on a GPU 2048 4096)");
    options.add("--tile", &tile_, "On a GPU: rows per sum of weight gradients; less than 2048 only for tests");
    ranks_.add_to(options);
    options.section("What is verified");
    options.add("--oracle", &with_oracle_,
                "Compare with the independent oracle: slow, plain loops, memory quadratic in the length");
    options.add_with_optional_value(
        "--certificate", &certificate_,
        "What holds for this model, data and settings, in one table. Without a value: all that takes "
        "no more than a few minutes; or one of " +
            join(certificate_choices()),
        checks::one_of(certificate_choices()));
    options.add("--run", &run_, "Instead, check the files of this run's checkpoints against their hashes");
    referee_.add_to(options);
    output_.add_to(options);
    options.first_page({"--model", "--data", "--length", "--chunk", "--dtype", "--objective", "--lora", "--oracle",
                        "--certificate", "--run", "--batch", "--against", "--defect", "--json"});
  }

 private:
  void run() override {
    output_.check();
    if (!run_.empty()) return check_run();
    if (referee_.given()) return judge();
    const bool certificate = options.given("--certificate");
    options.only({"--oracle", "--save-gradient", "--save-batch", "--ranks", "--sequence-ranks", "--lanes", "--shard"},
                 !certificate, " does not go with --certificate; leave it out");
    require(!certificate || this_process().count == 1, "--certificate is for one process");
    choose_device();
    options.only({"--computed-in", "--minutes"}, false, " is for --against; leave it out");
    input_.prepare();
    require(
        output_.batch.empty() || (input_.objective.kind == ObjectiveKind::sft && input_.objective.mean == Mean::tokens),
        "--save-batch is for the mean loss over all tokens; leave out --objective and --mean");
    const Ranks grid = ranks_.grid(input_.config, device_.kind());
    const Index tile = settings_.tile;
    settings_ = device_.settings(input_.config, grid.streams());
    settings_.objective = input_.objective, settings_.ranks = grid, settings_.tile = tile;
    in_float64_ = settings_;
    in_float64_.device = DeviceKind::cpu, in_float64_.dtype = DType::f64, in_float64_.tile = kTile;
    in_float64_.ranks = {}, in_float64_.wide_gradient = false;
    batches_ = input_.batches(settings_.ranks.streams());
    for (const Batch& batch : batches_) rows_ = std::max(rows_, layout_of(input_.config).rows(batch));
    const auto& tokens = input_.batch.tokens;
    const std::string_view bytes(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof tokens[0]);
    require_equal("the data", std::to_string(text_hash(bytes)));
    if (!input_.weights.empty()) require_equal("the model", contents_key(input_.weights));
    if (!input_.adapter.empty()) require_equal("the adapters", contents_key(input_.adapter));
    announce();
    add_objective_data();
    if (certificate) return certify();
    if (this_process().rank == 0) compute_truth();
    verify_mode(Mode::full, 0);
    verify_mode(Mode::checkpoint, 0);
    for (Index chunk : chunks_) verify_mode(Mode::stream, chunk);
    show_work("");
    if (this_process().rank == 0) conclude();
  }

  // What holds for this model, data and settings.
  void certify() {
    json_.erase("runs");
    const auto oracle_error = [this] {
      const GradientRun truth = gradient_in(in_float64_, Schedule::full(rows_));
      const oracle::Result result = oracle_result();
      return std::max(truth.gradient.difference(HostGradient(truth.gradient, result.gradient)).relative,
                      relative(truth.loss, result.loss));
    };
    const bool holds = print_certificate(certificate_.empty() ? "quick" : certificate_, input_,
                                         {settings_, batches_[0], chunks_, [this](Engine& engine) { load(engine); },
                                          oracle_error, rounding_limit(settings_.dtype)},
                                         json_);
    if (!holds) exit_code = 1;
    output_.write(json_, what_);
  }

  // Judges another trainer's gradient.
  void judge() {
    options.only({"--objective",      "--mean",     "--preference", "--beta",       "--label-smoothing",
                  "--margin",         "--clip-low", "--clip-high",  "--kl",         "--length",
                  "--documents",      "--data",     "--tokens",     "--chat",       "--date",
                  "--trust-messages", "--chunk",    "--tile",       "--ranks",      "--sequence-ranks",
                  "--lanes",          "--shard",    "--oracle",     "--save-batch", "--certificate"},
                 false, " does not go with --batch or --defect; leave it out");
    require(this_process().count == 1, "--batch and --defect are for one process");
    require(device_.device != "cuda", "--batch and --defect run on the CPU; leave out --device cuda");
    require(device_.dtype != "bf16", "--dtype bf16 is not exact enough to judge a gradient; use f64 or f32");
    device_.device = "cpu";
    if (device_.dtype == "auto") device_.dtype = "f64";
    input_.prepare_model();
    require(!referee_.reads_a_step() || !input_.weights.empty(),
            "--batch needs --model DIR: the model directory that was trained");
    settings_ = device_.settings(input_.config, 1);
    const std::string weights = input_.weights.empty() ? "random weights" : "weights of " + input_.weights.string(),
                      description = describe(input_.config) + ", " + weights;
    RefereeOptions::Outputs outputs{{}, [&](const Json& json) { output_.write(json, description); }};
    if (!output_.gradient.empty()) outputs.save_gradient = [&](const HostTensors& values) { save(values); };
    exit_code = referee_.run(
        {input_.config, settings_.dtype, input_.seed, [this](Engine& engine) { fill(engine); }, description}, outputs);
  }

  // Are the files of all checkpoints as the run saved them?
  void check_run() {
    options.require_alone("--run");
    const std::set<fs::path> checkpoints = all_checkpoints(run_);
    require(!checkpoints.empty(), run_, ": holds no checkpoint; name the --out directory of a run");
    for (const fs::path& checkpoint : checkpoints) {
      try {
        require(is_complete_checkpoint(checkpoint), "a part of it is missing; see ", run_, " and ", run_, "/training");
        const Json state = read_state(checkpoint);
        print("%s: %s as saved\n", checkpoint.string(), counted(std::ssize(state["files"]), "file"));
      } catch (const Error& error) {
        print("%s: DAMAGED: %s\n", checkpoint.string(), error.what());
        exit_code = 1;
      }
    }
  }

  // The gradient in float64, and if there are several ranks, the one that they must equal.
  void compute_truth() {
    show_work("full, float64");
    truth_ = gradient_in(in_float64_, Schedule::full(rows_));
    if (with_oracle_) compare_with_oracle(*truth_);
    if (settings_.ranks.all.size == 1) return;
    StepSettings alone = settings_;
    alone.ranks = {{}, {}, settings_.ranks.sequence.size * settings_.ranks.lanes};
    const Schedule schedule = schedule_for(Mode::stream, settings_, rows_, chunks_[0]);
    check("one process", chunks_[0], gradient_in(alone, schedule));
  }

  void choose_device() {
    const bool gpu = device_.kind() == DeviceKind::cuda;
    require(gpu || !options.given("--tile"), "--tile is for GPUs; on a CPU the tile is always ", kTile, " rows");
    settings_.tile = gpu ? tile_ : kTile;
    require(settings_.tile > 0 && settings_.tile % kTile == 0, "--tile ", tile_, " is not a multiple of ", kTile,
            " rows");
    const bool short_one = options.given("--certificate") && !gpu;
    if (chunks_.empty() && gpu) chunks_ = {tile_, 2 * tile_};
    if (chunks_.empty()) chunks_ = short_one ? std::vector<Index>{256} : std::vector<Index>{256, 512, 768};
    for (Index chunk : chunks_) check_chunk(chunk, settings_.tile);
    if (gpu) input_.default_length(3 * settings_.tile + kTile / 2);  // several tiles and chunks in every mode
    if (short_one) input_.default_length(300);
  }

  void announce() {
    const std::string weights = input_.weights.empty() ? "random weights" : "weights of " + input_.weights.string();
    const auto documents = static_cast<Index>(input_.batch.documents().size());
    const std::string trained = describe_trained(input_.config);
    print("%s, %s\n%s%s%s on %s, %s in %s, %s, objective %s\n\n", describe(input_.config), weights, trained,
          Escape{trained.empty() ? "" : "\n"}, name(settings_.dtype), device_name(settings_.device),
          counted(input_.batch.size(), "token"), counted(documents, "document"),
          counted(input_.batch.target_count(), "target"), input_.objectives.objective);
    std::fflush(stdout);
    what_ = format("%s, %s, %s, %s, objective %s", describe(input_.config), weights, name(settings_.dtype),
                   counted(input_.batch.size(), "token"), input_.objectives.objective);
    json_ = {{"config", config_to_json(input_.config)},
             {"dtype", name(settings_.dtype)},
             {"objective", input_.objectives.objective},
             {"length", input_.batch.size()},
             {"documents", documents},
             {"rounding_limit", rounding_limit(settings_.dtype)},
             {"runs", Json::array()}};
  }

  // Adds reference log-probs, old log-probs and advantages close to the model's own.
  void add_objective_data() {
    if (input_.objective.kind == ObjectiveKind::sft) return;
    StepSettings sft = in_float64_;
    sft.objective = {}, sft.micro_batches = 1;
    const Schedule full = Schedule::full(rows_);
    for (Batch& batch : batches_) batch = with_objective_data(batch, gradient_in(sft, full, {batch}).logp);
  }

  oracle::Result oracle_result() const {
    return oracle_gradient(input_.config, end_to_end(batches_), weights_in_float64(), input_.objective);
  }

  // From here on, the oracle's gradient is the ground truth.
  void compare_with_oracle(GradientRun& truth) {
    show_work("oracle");
    const Stopwatch watch;
    const oracle::Result result = oracle_result();
    const double seconds = watch.seconds();
    const HostGradient gradient(truth.gradient, result.gradient);
    const Difference error = truth.gradient.difference(gradient);
    const double loss_error = relative(truth.loss, result.loss);
    const bool exact = error.relative <= kExact && loss_error <= kExact;
    if (!exact) fail_with("the float64 gradient is not the oracle's");
    table_.add({"oracle", "", format("%.12f", result.loss), "", format("%.2f", seconds), "", "", ""});
    json_["oracle"] = {{"loss", result.loss}, {"error", error.relative}, {"tensor", error.tensor}, {"exact", exact}};
    oracle_error_ = error;
    truth.gradient = gradient;
    truth.loss = result.loss;
  }

  void verify_mode(Mode mode, Index chunk) {
    show_work(mode == Mode::stream ? format("stream %ld", chunk) : name(mode));
    const Schedule schedule = schedule_for(mode, settings_, rows_, chunk);
    const GradientRun run = gradient_in(settings_, schedule);
    require(std::isfinite(run.loss), "the loss is ", std::isnan(run.loss) ? "NaN" : "infinite",
            ": there is no gradient to verify");
    require(this_process().rank == 0 || run.peak == run.planned, "the memory differs from the plan");
    if (this_process().rank > 0) return;
    check(name(mode), mode == Mode::stream ? chunk : 0, run);
    if (mode == Mode::stream) streamed_ = run.gradient;
  }

  // Compares a run with the first one and with float64. chunk 0: the whole stream.
  void check(const std::string& label, Index chunk, const GradientRun& run) {
    const Difference rounding = run.gradient.difference(truth_->gradient);
    const double limit = rounding_limit(settings_.dtype);
    const bool equal =
        !first_ || (run.gradient == first_->gradient && run.loss == first_->loss && run.logp == first_->logp);
    const bool planned = run.peak == run.planned;
    if (!equal) fail_with("the modes have different bits");
    if (!planned) fail_with("the memory differs from the plan");
    if (!(rounding.relative <= limit && relative(run.loss, truth_->loss) <= limit)) {
      fail_with(settings_.dtype == DType::f64   ? "the gradient is not exact"
                : settings_.config.experts == 0 ? "the error is too large for rounding"
                                                : "the error is too large for rounding, unless that changed which "
                                                  "experts a row chooses; try --dtype f32");
    }
    for (const std::string& warning : run.warnings) json_["warnings"].push_back(warning);
    if (!run.warnings.empty()) fail_with(run.warnings.front());
    table_.add({label, chunk > 0 ? std::to_string(chunk) : "all", format("%.12f", run.loss),
                human_bytes(run.peak) + (planned ? "" : " (planned " + human_bytes(run.planned) + ")"),
                format("%.2f", run.seconds), format("%.1e", rounding.relative), rounding.tensor,
                !first_ ? "as " + label
                : equal ? "all equal"
                        : "DIFFER"});
    json_["runs"].push_back({{"mode", label},
                             {"chunk", chunk > 0 ? chunk : rows_},
                             {"loss", run.loss},
                             {"peak", run.peak},
                             {"planned", run.planned},
                             {"seconds", run.seconds},
                             {"error", rounding.relative},
                             {"tensor", rounding.tensor},
                             {"bits_equal", equal}});
    if (!first_) first_ = run;
  }

  void conclude() {
    if (!output_.batch.empty()) write_recorded(output_.batch, input_.batch, kWrittenBy);
    if (!output_.gradient.empty()) save(streamed_->values);
    table_.print();
    print("\n");
    if (oracle_error_) {
      print("Exact: the float64 gradient differs from the oracle's by %.1e (limit %.0e).\n", oracle_error_->relative,
            kExact);
    }
    for (const std::string& problem : problems_) print("FAILED: %s.\n", problem);
    if (problems_.empty()) {
      const std::string fingerprint = format("%016lx", first_->gradient.fingerprint());
      json_["fingerprint"] = fingerprint;
      const Ranks& ranks = settings_.ranks;
      const std::string where =
          ranks.all.size == 1 ? "in all modes"
                              : format("on %ld ranks (%s, %s each) as in one process, in all modes", ranks.all.size,
                                       counted(ranks.streams(), "stream"), counted(ranks.sequence.size, "rank"));
      print("Verified: every bit of the gradient is the same %s. Fingerprint: %s%s\n", where, fingerprint,
            settings_.device == DeviceKind::cpu ? ", on any CPU." : ".");
    }
    json_["verified"] = problems_.empty(), json_["problems"] = problems_;
    for (const Difference& d : first_->gradient.differences(truth_->gradient).all())
      json_["tensors"].push_back({{"tensor", d.tensor}, {"distance", d.relative}});
    output_.write(json_, what_);
  }

  void fail_with(const std::string& problem) {
    exit_code = 1;
    if (std::find(problems_.begin(), problems_.end(), problem) == problems_.end()) problems_.push_back(problem);
  }

  static double relative(double loss, double truth) {
    return std::abs(loss - truth) / std::max(std::abs(truth), 1e-300);
  }

  void fill(Engine& engine) const {
    load(engine);
    if (settings_.dtype == DType::bf16) engine.round_weights();  // all types start from the same weights
  }
  void load(Engine& engine) const {
    if (input_.weights.empty() || part_is_new()) engine.initialise(input_.seed, 0.05);
    if (!input_.weights.empty()) engine.load(input_.weights, input_.adapter);
  }

  bool part_is_new() const { return input_.part.adapters(); }

  // The gradient of the batches, on a device with exactly the planned memory.
  GradientRun gradient_in(const StepSettings& settings, const Schedule& schedule) const {
    return gradient_in(settings, schedule, batches_);
  }
  GradientRun gradient_in(const StepSettings& settings, const Schedule& schedule,
                          const std::vector<Batch>& batches) const {
    const std::size_t planned = plan(settings, rows_, schedule).peak;
    const auto engine = make_engine(settings, rows_, planned);
    fill(*engine);
    engine->synchronize();
    StepRun run = run_step(*engine, batches, schedule);
    return {std::move(run), engine->device().arena.peak(), planned, HostGradient(settings.config, engine->gradient()),
            engine->warnings()};
  }

  // Sets the weights of the oracle's model.
  std::function<void(Cpu&, Model<double>&)> weights_in_float64() const {
    return [this](Cpu& host, Model<double>& m) {
      const auto engine = make_engine(in_float64_, 0, plan_generation(in_float64_, {}));
      fill(*engine);
      const HostTensors values = engine->weights();
      std::size_t i = 0;
      for (auto& e : table(m.config, m.weights)) host.upload(*e.matrix, values[i++].data());
    };
  }

  void save(const HostTensors& gradient) const {
    StoredNames names;
    if (!input_.weights.empty()) names = ModelFiles(input_.weights, input_.config.root).names();
    output_.save_gradient(settings_.config, names, settings_.dtype, gradient);
  }

  VerifyInput input_;
  RefereeOptions referee_;
  DeviceOptions device_{.optimizer = "none"};
  RankOptions ranks_;
  Index tile_ = kGpuTile;
  std::vector<Index> chunks_;
  std::string run_, certificate_;  // quick if it has no value
  std::string what_;               // is verified, in words
  VerifyOutput output_;
  bool with_oracle_ = false;

  StepSettings settings_, in_float64_;
  std::vector<Batch> batches_;  // a micro-batch per stream
  Index rows_ = 0;              // of the longest one
  std::optional<GradientRun> truth_, first_;
  std::optional<HostGradient> streamed_;
  std::optional<Difference> oracle_error_;
  TextTable table_{{"mode", "chunk", "loss", "memory", "seconds", "rounding", "in", "bits"}};
  Json json_;
  std::vector<std::string> problems_;
};

}  // namespace

std::unique_ptr<Command> verify_command(CLI::App& app) { return std::make_unique<VerifyCommand>(app); }

}  // namespace streambp
