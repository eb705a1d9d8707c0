// The task of a training run: what its options ask for, and what they leave open, decided before training or writing
// starts.
#pragma once

#include "commands/train_memory.h"
#include "commands/train_options.h"
#include "data/documents/data_checks.h"
#include "data/documents/reference_logps.h"
#include "data/documents/stories.h"
#include "text/tokenizer/byte_tokenizer.h"
#include "training/train.h"

namespace streambp {

struct TrainTask {
  Run run;
  std::size_t plain_memory = 0;    // of a step that keeps layer inputs only
  std::string prompt;              // of the sample at the end
  std::vector<std::string> parts;  // of the data, described, if there are several
  std::string first_learned;       // of the data
  std::vector<std::string> notes;  // for the user
};

// How adapters name their base for others: without the directories of this machine.
inline std::string public_name(const fs::path& model) {
  fs::path path = model.lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // "models/Qwen3/"
  if (const std::string name = hub_name(path); !name.empty()) return name;
  if (path.is_relative() && !path.string().starts_with(".")) return path.string();
  path = fs::absolute(path).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  const fs::path name = path.filename(), run = path.parent_path().filename();
  return (checkpoint_step(name.string()) ? run / name : name).string();
}

class Preparation {
 public:
  Preparation(const TrainOptions& options, RunDirectory& directory)
      : o(options), directory(directory), checkpoint(directory.checkpoint()) {}

  TrainTask prepare() {
    run.length = o.length, run.batch = o.batch, run.micro_batches = o.micro_batches;
    run.optimizer = o.optimizer, run.seed = o.seed, run.stop_after = o.stop_after;
    run.evaluation_interval = o.evaluation_interval, run.stop_when_worse = o.stop_when_worse;
    run.checkpoint_interval = o.checkpoint_interval;
    run.start = checkpoint;
    if (o.fine_tunes()) {
      run.model = o.model.model;
      run.reference_caches = {fs::absolute(o.data[0]).parent_path(), directory.path()};
      if (checkpoint.empty() || o.trains_adapters()) run.start = model_directory(o.model.model);
    }
    if (o.trains_adapters() && !checkpoint.empty()) run.adapters = checkpoint;
    if (run.adapters.empty() && !o.adapter.empty()) run.adapters = adapter_directory(o.adapter);
    if (!o.fine_tunes()) {
      prepare_text();
    } else if (o.online_grpo()) {
      prepare_prompts();
    } else {
      directory.create();  // the tokens are kept there
      prepare_documents();
    }
    if (o.schedule == "wsd" && !o.resumed && !o.given("--cooldown"))
      run.optimizer.cooldown = std::max<Index>(1, run.optimizer.steps / 5);
    TrainMemory memory(o, run);
    const Index chunk = memory.choose();
    if (const std::string note = memory.check_disk(directory.path()); !note.empty()) task.notes.push_back(note);
    const StepSettings& chosen = run.settings;
    const StepSettings plain = Fit{.places = chosen.places, .block = chosen.block}.settings(chosen);
    task.plain_memory = plan(plain, run.rows(), schedule_for(mode_named(o.mode), plain, run.rows(), chunk)).peak;
    run.options = options_of_run(chunk);
    return std::move(task);
  }

 private:
  // The options with the values that were left to this program.
  Json options_of_run(Index chunk) const {
    Json options = o.table.lasting();
    options["--dtype"] = run.settings.dtype == DType::bf16 ? "bf16" : "f32";
    options["--length"] = run.length, options["--pack"] = run.pack, options["--chunk"] = chunk;
    options["--steps"] = run.optimizer.steps, options["--warmup"] = run.optimizer.warmup;
    options["--rate"] = run.optimizer.rate;
    options["--cooldown"] = run.optimizer.cooldown;
    options["--eval-every"] = run.evaluation_interval;
    if (run.grpo) options["--completion"] = run.grpo->completion();
    return options;
  }

  // Documents are cut at this length.
  Index longest_piece() const {
    const Config& c = run.settings.config;
    return c.positions == Positions::learned ? std::min(run.length, c.max_length) : run.length;
  }

  // The model, and what of it is trained.
  Config config() const {
    Config c = read_config(run.start);
    if (run.adapters.empty()) {
      o.part.apply(c);
    } else {
      AdapterDirectory(run.adapters).add_to(c);
      apply_base(o.part.base, c);
    }
    if (o.save_dtype != "same") c.mxfp4 = false;
    return o.balanced(c);
  }

  // As rank 0 plans them.
  StepSettings settings(const Config& config, Index micro_batches) const {
    StepSettings s = o.device.settings(config, micro_batches);
    s.ranks = o.ranks.planned(config);
    const Mode mode = mode_named(o.mode);
    s.kept = o.budget.kept_choice(mode, config).only.value_or(KeptSets());
    s.block = o.budget.chosen_block(mode).value_or(0);
    return s;
  }

  // From scratch: bytes of a text.
  void prepare_text() {
    const std::string name = o.data.empty() ? "generated stories" : o.data[0];
    const auto text = std::make_shared<Text>(o.data.empty() ? stories(o.seed, std::size_t{1} << 21)
                                                            : read_text(data_files(o.data)[0], available_memory() / 4),
                                             o.evaluation_fraction, o.length, name);
    ModelOptions sizes = o.model;
    sizes.vocab = Text::kVocabulary;
    run.settings = settings(o.balanced(sizes.config(o.length)), o.micro_batches);
    run.layout.emplace(run.settings.config);
    run.layout->others = byte_tokenizer_files();
    task.prompt = (o.prompt.empty() ? text->prompt() : o.prompt).substr(0, static_cast<std::size_t>(o.length - 1));
    run.source = text_source(text, name, o.seed, o.batch, o.length);
  }

  // Fine-tuning: documents in the model's tokens.
  void prepare_documents() {
    run.settings = settings(config(), o.micro_batches);
    choose_layout();
    const TokenFile file =
        tokenised(data_parts(o.data), run.start, o.tokens, directory.path(), data_parts(o.evaluation_data));
    file.require_vocabulary(run.settings.config.vocab);
    o.objectives.require_kind(file);
    run.settings.objective = o.objectives.settings(file.most_learned());
    run.settings.objective.temperature = o.grpo.temperature;
    if (const std::string skipped = file.skipped(); !skipped.empty()) task.notes.push_back(skipped);
    if (o.repacked)
      task.notes.push_back(
          "another version of streambp began this run, with other packs; from here on, its steps differ");
    run.pack = o.pack > 0 ? o.pack : usual_pack(file);
    const TrainMemory memory(o, run);
    if (!o.resumed && !o.given("--length")) run.length = memory.length_for(file);
    run.pack = std::min(run.pack, run.length);
    run.documents = std::make_shared<Documents>(
        file,
        DocumentSettings{o.evaluation_fraction, run.length, longest_piece(), o.batch, o.micro_batches, o.seed,
                         too_long(), run.settings.objective.scale_rewards, run.pack,
                         [&](Index tokens) { return memory.remedy_for(tokens); }, layout_of(run.settings.config)});
    choose_steps([&](double epochs) { return run.documents->steps(epochs); });
    choose_evaluations();
    run.source = document_source(run.documents, description(file), file.fingerprint());
    describe_parts(file);
    check_data(file);
    const Index trained_for = run.settings.config.max_length, longest = std::min(longest_piece(), file.longest());
    run.settings.config.rope_scaling.longest = longest;
    if (trained_for > 0 && longest > trained_for)
      task.notes.push_back(format("some documents are longer than the model's context of %ld tokens", trained_for));
  }

  // Small data gives enough steps; much data has steps of the usual size. The completions of a group stay together, if
  // they can.
  static Index usual_pack(const TokenFile& file) {
    return std::min(FineTuning::kPack, ceil_div(file.training_tokens(), file.groups() ? 1 : FineTuning::kSteps));
  }

  std::string description(const TokenFile& file) const {
    const char* unit = kDataUnits[static_cast<int>(file.kind())];
    const Index tokens = file.token_count(), learned = file.learned_count();
    std::string text = file.parts.size() == 1 ? shown(file.parts[0]) : counted(std::ssize(file.parts), "part");
    text += format(": %s of %ld tokens in all, %ld in the loss (%.1f%%), the longest %ld",
                   counted(file.documents() / file.together(), unit), tokens, learned,
                   100 * static_cast<double>(learned) / static_cast<double>(tokens), file.longest_together());
    if (run.documents->left_out > 0) text += format("; %ld have no targets within --length", run.documents->left_out);
    constexpr const char* done[] = {"split", "truncated", "dropped"};  // in the order of TooLong
    if (const Index count = run.documents->too_long; count > 0)
      text += format("; %ld longer than %ld tokens: %s", count, longest_piece(), done[static_cast<int>(too_long())]);
    if (run.documents->evaluation.empty()) text += "; none are held out";
    return text;
  }
  void describe_parts(const TokenFile& file) {
    const char* unit = kDataUnits[static_cast<int>(file.kind())];
    for (std::size_t i = 0; i < file.parts.size() && file.parts.size() > 1; ++i) {
      task.parts.push_back(shown(file.parts[i]) + ": " + counted(file.parts[i].documents / file.together(), unit));
      if (i >= file.parts.size() - file.held_out)
        task.parts.back() += ", held out";
      else if (file.mixes())
        task.parts.back() += format(", %.0f%% of an epoch's tokens, each used %.2f times",
                                    100 * run.documents->share(i), run.documents->passes(i));
    }
  }
  static std::string shown(const TokenPart& part) {
    return part.name + (part.form.empty() ? "" : " (" + part.form + ")");
  }

  // A run that cannot learn is refused, or the user is warned.
  void check_data(const TokenFile& file) {
    const DataChecks checks(file, run.start, o.tokens);
    task.first_learned = checks.first_learned();
    for (const std::string& text : checks.warnings()) task.notes.push_back(text);
    if (run.documents->cut_off == file.documents())
      task.notes.push_back("warning: every document is cut at --length, so the model learns no end; use a larger one");
    bool differ = !file.groups();
    for (Index i = 0; i < file.documents() && !differ; ++i) differ = file.advantage(i).plain != 0;
    require(differ, file.name(), ": all completions of a prompt have the same reward, for every prompt, so there is ",
            "nothing to learn; check the rewards");
  }

  // On-line GRPO: prompts for which the model samples completions.
  void prepare_prompts() {
    const fs::path reference = reference_model();
    choose_layout();
    const Config config = this->config();
    run.grpo = std::make_unique<OnlineGrpo>(
        o.grpo, OnlineGrpo::Data{o.data, o.evaluation_data, o.tokens.chat, o.evaluation_fraction, o.seed}, run.start,
        reference);
    require(run.grpo->completions() >= o.micro_batches, "a round of ", run.grpo->completions(),
            " completions is too small for ", o.micro_batches,
            " micro-batches (--accumulate, by default one per token stream); use more --prompts, or fewer processes");
    run.grpo->micro_batches = o.micro_batches;
    const bool given = o.resumed || o.given("--completion");
    given ? choose_rounds(config, o.grpo.completion) : choose_completions(config);
    choose_steps([&](double epochs) { return epochs * static_cast<double>(run.grpo->steps_per_epoch()); });
    run.source.description =
        format("%s, %ld with %s of up to %ld tokens each in a round", counted(run.grpo->prompts(), "prompt"),
               o.grpo.prompts, counted(o.grpo.group, "completion"), run.grpo->completion());
    run.source.fingerprint = run.grpo->fingerprint;
  }

  // Completions of the usual size, or what there is room for.
  void choose_completions(const Config& config) {
    const Index usual = o.grpo.completion, prompt = run.grpo->longest_prompt(),
                context = config.max_length > 0 ? config.max_length : kLongestStream,
                room = std::min({usual, context - prompt, o.given("--length") ? o.length - prompt : usual});
    require(room > 0, "the longest prompt has ", prompt, " tokens, which leaves no room for a completion in ",
            room == context - prompt ? "the model's context of " : "--length ", room + prompt,
            " tokens; leave such prompts out");
    const auto fits = [&](Index completion) {
      choose_rounds(config, completion);
      return TrainMemory(o, run).fits();
    };
    const Index completion = largest(room, fits, room);
    choose_rounds(config, std::max<Index>(completion, 1));
    if (completion < usual)
      task.notes.push_back(format("completions have up to %ld tokens instead of %ld, for lack of room in %s",
                                  completion, usual, completion < room ? "memory" : "the model's context or --length"));
  }

  // What rounds with completions of up to so many tokens need.
  void choose_rounds(Config config, Index completion) {
    run.grpo->set_completion(completion);
    const Index longest = run.grpo->longest(), all = layout_of(config).rows_of_packs(run.grpo->completions(), longest);
    config.rope_scaling.longest = longest;
    require(config.positions == Positions::rope || longest <= config.max_length, "the longest prompt and --completion ",
            completion, " have ", longest, " tokens, more than the ", config.max_length, " positions of the model");
    run.settings = settings(config, o.micro_batches);
    run.settings.objective = o.objectives.settings(completion);
    run.settings.objective.temperature = o.grpo.temperature;
    // A round has more micro-batches if its completions are long. Two rounds of the ranks have the memory of any more.
    const Index two_each = 2 * o.ranks.planned(config).streams();
    const auto choose_length = [&](Index length) {
      if ((run.length = length) < all) run.settings.micro_batches = std::max(o.micro_batches, two_each);
    };
    const bool given = o.resumed || o.given("--length");
    choose_length(given ? o.length : std::min(all, std::max<Index>(longest, 4096)));
    for (Index before = 0; !given && before != run.length;)
      choose_length(std::max(longest, TrainMemory(o, run).length_for(longest, before = run.length)));
    require(run.length >= longest, "--length ", run.length, ": the longest prompt and its completion have ", longest,
            " tokens");
  }

  // The reference model of --kl: the model that the run started from.
  fs::path reference_model() {
    if (!o.resumed || checkpoint.empty()) {
      const fs::path model = fs::absolute(model_directory(o.model.model));
      if (o.objectives.numbers.kl > 0)
        run.reference = Json{{"path", model.string()}, {"model", model_key(model)}}.dump();
      return model;
    }
    if (o.objectives.numbers.kl == 0) return {};
    const std::string state = state_of(checkpoint).string();
    run.reference = stored_reference(checkpoint);
    const Json stored = parse_json(run.reference, state);
    const fs::path model = Fields(stored, state).get<std::string>("path");
    require(is_model(model) && model_key(model) == stored.at("model"), model.string(),
            ": is no longer the model that the run in ", o.out, " started from, which --kl needs; restore it");
    return model;
  }

  // Checkpoints have the layout of the model, or of the adapters, that were loaded.
  void choose_layout() {
    run.layout.emplace(run.start);
    const ChatOptions& chat = o.tokens.chat;
    if (!chat.given.empty()) run.layout->others["chat_template.jinja"] = Chat::of(run.start, chat).source();
    if (o.trains_adapters()) {
      run.layout->base = fs::absolute(run.start);
      run.base = contents_key(run.start);
      run.layout->adapter_config = run.adapters.empty()
                                       ? adapter_config(config(), o.part.settings(), public_name(run.start))
                                       : AdapterDirectory(run.adapters).config_for(public_name(run.start));
      if (!run.adapters.empty() && AdapterDirectory(run.adapters).drops_out())
        task.notes.push_back("the adapters were trained with lora_dropout; this run has none");
      require(o.save_dtype == "same", "--save-dtype: adapters are always saved in float32; leave it out");
      return;
    }
    const std::map<std::string, const char*> types = {{"f32", "F32"}, {"bf16", "BF16"}, {"f16", "F16"}};
    if (o.save_dtype != "same") run.layout->store_as(types.at(o.save_dtype));
    run.layout->require_writable(run.settings.config);
  }

  // steps_of(epochs): how many that takes.
  void choose_steps(const std::function<double(double)>& steps_of) {
    run.steps_per_epoch = steps_of(1);
    if (o.resumed) return;
    if (!o.given("--rate")) {
      run.optimizer.rate = FineTuning::rate(run.settings.config.hidden, o.trains_adapters()) *
                           (o.objectives.objective == "sft" ? 1 : FineTuning::kObjectives);
    }
    if (!o.given("--steps")) {
      require(o.epochs * run.steps_per_epoch < 0x1p30, "--epochs ", o.epochs, " is more than 2^30 steps; use fewer");
      const auto steps = static_cast<Index>(std::ceil(steps_of(o.epochs)));
      run.optimizer.steps = round_up(std::max<Index>(1, steps), o.online_grpo() ? o.grpo.inner : 1);
      warn_of_few_steps();
    }
    if (!o.given("--warmup"))
      run.optimizer.warmup = std::min(FineTuning::kWarmup, run.optimizer.steps / FineTuning::kWarmupShare);
  }

  // A forward pass takes a third of the time of a step on as many tokens.
  void choose_evaluations() {
    if (o.resumed || o.given("--eval-every")) return;
    const double tokens = static_cast<double>(run.documents->evaluation_tokens),
                 step = 3 * run.documents->tokens_per_step();
    run.evaluation_interval = std::max({FineTuning::kEvaluations, run.optimizer.steps / FineTuning::kEvaluations,
                                        static_cast<Index>(std::ceil(tokens / step / FineTuning::kEvaluating))});
  }

  void warn_of_few_steps() {
    if (run.optimizer.steps >= FineTuning::kFewSteps) return;
    const double epochs = std::ceil(static_cast<double>(FineTuning::kFewSteps) / run.steps_per_epoch);
    std::string remedy = format("use --epochs %g", epochs);
    if (run.batch * run.micro_batches > 1 && !o.online_grpo()) remedy += ", or less of --batch and --accumulate";
    if (run.documents && run.documents->share_packs()) remedy += ", or a smaller --pack";
    if (run.documents && run.documents->file.longest_whole() < run.documents->file.longest())
      remedy += ", or a smaller --length, at which texts are cut";
    if (o.online_grpo()) remedy += ", or fewer --prompts a step";
    task.notes.push_back("warning: only " + counted(run.optimizer.steps, "step") +
                         ", in which a model learns little; " + remedy);
  }

  TooLong too_long() const { return static_cast<TooLong>(std::ranges::find(kTooLong, o.too_long) - kTooLong.begin()); }

  const TrainOptions& o;
  RunDirectory& directory;
  const fs::path checkpoint;
  TrainTask task;
  Run& run = task.run;
};

// Rank 0 decides where the run is written and where it continues.
inline void open_directory(TrainOptions& options, std::optional<RunDirectory>& directory) {
  const auto begin = options.resume ? RunDirectory::Begin::resume : RunDirectory::Begin::fresh;
  const bool first = this_process().rank == 0;
  const auto open = [&](const auto&... where) {
    directory.emplace(where..., begin);
    options.complete(directory->resumes() ? directory->state_file() : fs::path());
    directory->create();
    options.out = directory->path();
  };
  if (first) open(options.out);
  const std::string path = from_first(options.out), checkpoint = from_first(first ? directory->checkpoint() : "");
  if (!first) open(path, checkpoint);
}

// Opens the run's directory, and decides everything that the options leave open. A refused run leaves no files behind.
inline TrainTask prepare(TrainOptions& options, std::optional<RunDirectory>& directory) {
  open_directory(options, directory);
  options.room = {options.ranks.room(options.device.kind()),
                  far_room_of_each_rank(options.device.kind(), options.budget.directory)};
  TrainTask task;
  first_then_others([&] { task = Preparation(options, *directory).prepare(); });
  StepSettings& settings = task.run.settings;
  require_equal("the data", task.run.source.fingerprint);
  for (const auto& [what, files] : {std::pair{"the model", task.run.start}, {"the adapters", task.run.adapters}})
    if (this_process().count > 1 && !files.empty()) require_equal(what, contents_key(files));
  settings.ranks = options.ranks.grid(settings.config, settings.device);
  return task;
}

}  // namespace streambp
