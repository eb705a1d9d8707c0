// The story of a run, top to bottom: parse -> plan -> load -> loop { batch, gradient, step } -> save.
//
// With nvcc this file is CUDA; without, it is C++.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>

#include "commands/command.cuh"
#include "commands/display.cuh"
#include "commands/process.cuh"
#include "commands/train_options.cuh"
#include "data/documents/sources.cuh"
#include "data/documents/stories.cuh"
#include "data/tokenizer/byte_tokenizer.cuh"
#include "model/generate.cuh"
#include "training/grpo/groups.cuh"
#include "training/interruption.cuh"
#include "training/plan.cuh"
#include "training/reference_logps.cuh"
#include "training/run_directory.cuh"

namespace streambp {

class TrainCommand : public Command, private TrainOptions {
 public:
  explicit TrainCommand(CLI::App& parent) {
    CLI::App* command = parent.add_subcommand(
        "train",
        "Train a language model, exactly, in little memory: fine-tune one, or begin from scratch.\n\n"
        "A model directory as Hugging Face lays it out, and a file of conversations:\n\n"
        "  streambp train --model Qwen3-0.6B --data chats.jsonl --out tuned\n\n"
        "Every checkpoint in --out is a model directory again. Without --model: a small Llama on stories that the\n"
        "program makes up, in about a minute on two cores; it samples from the result at the end. With your own\n"
        "text and half a gigabyte:\n\n"
        "  streambp train --data book.txt --length 4096 --memory 512MiB --steps 2000 --out book\n\n"
        "A run leaves metrics.jsonl and checkpoints in its output directory. --out DIR --resume continues it with\n"
        "the same bits as if it had never stopped, in any mode and with any chunk.");
    add_to(*command);
    command->callback([this] { run(); });
  }

 private:
  using Clock = std::chrono::steady_clock;

  void run() {
    directory.emplace(out, resume ? RunDirectory::Begin::resume : RunDirectory::Begin::fresh);
    const fs::path checkpoint = directory->checkpoint();
    if (resume) {
      restore(directory->state_file());
    } else if (fine_tunes()) {
      adapt_to_fine_tuning();
    }
    check();
    if (given("--chunk")) check_chunk(chunk, tile_of(device.kind()));
    if (fine_tunes()) sample_length = 0;
    directory->create();
    out = directory->path();

    Source source = rounds()       ? prepare_prompts(checkpoint)
                    : fine_tunes() ? prepare_documents(checkpoint)
                                   : prepare_text();
    device.dtype = settings.dtype == DType::bf16 ? "bf16" : "f32";  // what "auto" came to belongs to the run
    const Schedule schedule = choose_schedule();
    machine_rate = matmul_rate(settings.device, settings.dtype);
    const auto engine = make_engine(settings, documents * length, capacity(schedule));
    if (needs_reference()) attach_reference(*engine, source, schedule, checkpoint);
    train(*engine, source, schedule, checkpoint);
  }

  void train(Engine& engine, const Source& source, const Schedule& schedule, const fs::path& checkpoint) {
    Index step = 0;
    if (!checkpoint.empty()) {
      step = resume_from(checkpoint, source, engine);
    } else if (fine_tunes()) {
      engine.load(model_directory(model.model));
    } else {
      engine.initialise(seed);
    }
    directory->open(step, options());
    if (rounds()) sampled->record_in(directory->keep_until(step, "completions.jsonl"));
    announce(source, schedule, engine.device().arena.capacity(), step);

    if (step == 0) evaluate(engine, source, schedule, step);
    const Index last = stop_after > 0 ? std::min(stop_after, optimizer.steps) : optimizer.steps;
    if (step >= last) std::printf("nothing to do: the run is at step %ld of %ld\n", step, optimizer.steps);
    start = Clock::now(), first_step = step;
    if (learn_until(last, step, engine, source, schedule) && sample_length > 0) sample(engine);
  }

  // Returns false if a signal ended the run early.
  bool learn_until(Index last, Index step, Engine& engine, const Source& source, const Schedule& schedule) {
    const Interruption interruption;
    CheckpointTimer timer(checkpoint_interval, seconds());
    while (step < last) {
      ++step;
      std::vector<Batch> batches;
      for (Index i = 0; i < micro_batches && !rounds(); ++i) batches.push_back(source.batch(step, i));
      engine.device().reset_work();
      const auto step_start = Clock::now();
      const StepResult result = rescuing(engine, source, schedule, step - 1, [&] {
        return rounds() ? sampled->step(engine, settings.objective, schedule, length, optimizer, step)
                        : engine.step(batches, schedule, optimizer, step);
      });
      engine.synchronize();
      report(step, last, rounds() ? sampled->batches : batches, result, engine.device(),
             std::chrono::duration<double>(Clock::now() - step_start).count());
      const bool at_end = step == last, interrupted = Interruption::signal() != 0 && can_resume_after(step);
      if (!interrupted && (at_end || (evaluation_interval > 0 && step % evaluation_interval == 0)))
        evaluate(engine, source, schedule, step);
      const bool due = can_resume_after(step) && timer.due(step, seconds());
      if (at_end || interrupted || due) {
        const bool asked_for = at_end || (due && !timer.by_time());
        const double begun = seconds();
        save(engine, source, step, asked_for ? RunDirectory::Keep::always : RunDirectory::Keep::newest_two);
        timer.saved(begun, seconds());
      }
      if (interrupted) return stopped(step, at_end);
    }
    return true;
  }

  bool stopped(Index step, bool at_end) {
    exit_code = 128 + Interruption::signal();
    std::printf("stopped  after step %ld by a signal; the checkpoint is %s\n", step, directory->checkpoint().c_str());
    if (!at_end) std::printf("         continue with streambp train --out %s --resume\n", out.c_str());
    return false;
  }

  static double seconds() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

  // On-line GRPO samples at the beginning of a round, so a run can only resume between rounds.
  bool can_resume_after(Index step) const { return !rounds() || step % groups.inner == 0; }

  // Calls `step`. If it fails, it has left the weights as they were after step `done`: saves them.
  template <class F>
  StepResult rescuing(Engine& engine, const Source& source, const Schedule& schedule, Index done, F&& step) {
    try {
      return step();
    } catch (const Error& error) {
      rescue(engine, source, schedule, done);
      fail(error.what(), "; ", directory->last_checkpoint());
    }
  }

  void rescue(Engine& engine, const Source& source, const Schedule& schedule, Index done) {
    if (done <= first_step || !can_resume_after(done) || directory->checkpoint().filename() == checkpoint_name(done))
      return;
    try {
      engine.release_gradient();
      if (!rounds()) {  // what they made of the last batch tells whether it is the weights that are at fault
        for (const double logp : engine.evaluate(source.batch(done, 0), schedule))
          if (!std::isfinite(logp)) return;
      }
      save(engine, source, done, RunDirectory::Keep::always);
    } catch (const std::exception&) {  // the disk is full, or the device is lost: the first error says more
    }
  }

  // --- Before the loop ---

  // A model from scratch, which learns the bytes of a text.
  Source prepare_text() {
    const std::string name = data.empty() ? "the program's own stories" : data[0];
    text = std::make_shared<Text>(
        data.empty() ? stories(seed, std::size_t{1} << 21) : read_file(data[0], std::size_t{1} << 36),
        evaluation_fraction, length, name);
    ModelOptions sizes = model;
    sizes.vocab = Text::kVocabulary;
    settings = device.settings(sizes.config(length), micro_batches);
    layout.emplace(settings.config);
    layout->others = byte_tokenizer_files();
    return text_source(text, name, seed, documents, length);
  }

  // How the model's files are laid out, and so will be those of its successors.
  void settle_layout(const fs::path& from) {
    layout.emplace(from);
    const std::map<std::string, const char*> types = {{"f32", "F32"}, {"bf16", "BF16"}, {"f16", "F16"}};
    if (save_dtype != "same") layout->store_as(types.at(save_dtype));
    layout->require_writable();
  }

  // How long to learn, where nobody says.
  void settle_steps(Index of_an_epoch) {
    if (!given("--steps")) {
      const double steps = std::ceil(epochs * static_cast<double>(of_an_epoch));
      require(steps < 0x1p30, "--epochs ", epochs, " are more steps than make sense");
      optimizer.steps = round_up(std::max<Index>(1, static_cast<Index>(steps)), rounds() ? groups.inner : 1);
    }
    if (!given("--warmup")) optimizer.warmup = std::min<Index>(20, optimizer.steps / 10);
  }

  // A model that is there already, which learns documents in its own tokens.
  Source prepare_documents(const fs::path& checkpoint) {
    const fs::path from = checkpoint.empty() ? fs::path(model_directory(model.model)) : checkpoint;
    settings = device.settings(read_config(from), micro_batches);
    settle_layout(from);
    tokens.learn_all = learn == "all";
    const TokenFile& file = token_file.emplace(tokenised({data.begin(), data.end()}, from, tokens, out));
    file.require_vocabulary(settings.config.vocab);
    objectives.require_kind(file);
    settings.objective = objectives.settings(file.most_learned());
    const std::string name = data.size() == 1 ? data[0] : std::to_string(data.size()) + " files";
    const auto about = file.metadata();
    if (about.contains("skipped") && about.contains("first_skipped") && about.at("skipped") != "0") {
      std::printf("skipped  %s of the data, the first: %s\n", about.at("skipped").c_str(),
                  about.at("first_skipped").c_str());
    }
    const std::string description =
        format("%s: %ld %ss of %ld tokens in all, %ld to learn, the longest %ld", name.c_str(),
               file.documents() / file.together(), kDataUnits[static_cast<int>(file.kind())], file.token_count(),
               file.learned_count(), file.longest_together());
    if (!resume && !given("--length")) length = length_for(file);
    const TooLong choice = too_long == "split"      ? TooLong::split
                           : too_long == "truncate" ? TooLong::truncate
                                                    : TooLong::refuse;
    packed = std::make_shared<Documents>(
        file, DocumentSettings{evaluation_fraction, length, longest_piece(), documents, micro_batches, seed, choice,
                               settings.objective.scales_rewards()});
    if (!resume) settle_steps(packed->steps_per_epoch());
    longest_document = file.longest();
    std::string notes =
        packed->left_out == 0 ? "" : format("; %ld with nothing to learn in --length", packed->left_out);
    if (packed->evaluation.empty()) notes += "; none is held out";
    return document_source(packed, description + notes, file.fingerprint());
  }

  // Completions of which nothing else is said were sampled by the starting model.
  bool needs_reference() const {
    if (rounds()) return false;
    const bool sampled_by_it = token_file && token_file->groups() && token_file->old().empty();
    return settings.objective.has_reference() || sampled_by_it;
  }

  // Where the model lies whose distance --kl keeps small: the one that the run began from, and no other.
  fs::path starting_model(const fs::path& checkpoint) {
    if (checkpoint.empty()) {
      const fs::path start = fs::absolute(model_directory(model.model));
      if (objectives.kl > 0) reference = Json{{"path", start.string()}, {"model", model_key(start)}}.dump();
      return start;
    }
    if (objectives.kl == 0) return {};
    reference = reference_of(checkpoint);
    const Json begun = parse_json(reference, (checkpoint / "training/state.json").string());
    const Fields fields(begun, (checkpoint / "training/state.json").string());
    const fs::path start = fields.get<std::string>("path");
    require(fs::is_directory(start) && model_key(start) == begun.at("model"), start.string(),
            ": is not the model any more that the run in ", out, " began from, which --kl needs; bring it back");
    return start;
  }

  static std::string reference_of(const fs::path& checkpoint) {
    const fs::path path = checkpoint / "training/state.json";
    const Json state = parse_json_file(path);
    return Fields(state, path.string()).get<std::string>("reference");
  }

  // A model that is there already, which is rewarded for what it makes of prompts.
  Source prepare_prompts(const fs::path& checkpoint) {
    const fs::path start = starting_model(checkpoint), from = checkpoint.empty() ? start : checkpoint;
    settle_layout(from);
    const Config config = read_config(from);
    sampled = std::make_unique<Groups>(groups, data, from, tokens.chat, start, evaluation_fraction, seed);
    const Index longest = sampled->longest(), all = sampled->completions() * longest;
    require(config.positions == Positions::rope || longest <= config.max_length, "the longest prompt and --completion ",
            groups.completion, " have ", longest, " tokens, more than the ", config.max_length,
            " positions that the model has learned");
    if (!resume && !given("--length")) length = std::min(all, std::max<Index>(longest, 4096));
    require(length >= longest, "--length ", length, ": the longest prompt and its completion have ", longest,
            " tokens");
    settings = device.settings(config, length < all ? 2 : 1);  // two: any number of them
    settings.objective = objectives.settings(groups.completion);
    if (!resume) settle_steps(sampled->steps_per_epoch());
    return {format("%ld prompts, %ld with %ld completions each in a round", sampled->prompts(), groups.prompts,
                   groups.size),
            sampled->fingerprint,
            {},
            {}};
  }

  // Packs as long as the longest document, and a few thousand tokens at least, so that a step is not all overhead; but not
  // longer than the memory allows, nor than all that there is to learn.
  Index length_for(const TokenFile& file) const {
    constexpr Index usual = 4096;
    const Index all = round_up(file.token_count(), kTile), longest = round_up(file.longest_together(), kTile),
                limit = settings.config.max_length > 0 ? file.together() * settings.config.max_length : kLongestStream,
                wanted = std::min({std::max(longest, usual), all, limit, kLongestStream / documents});
    const Mode chosen = mode_named(mode);
    const Index rows = mode_chunk();
    const std::size_t room = memory.empty() ? free_memory(settings.device) / 100 * 95 : parse_bytes(memory);
    auto needed = [&](Index n) {
      return plan(settings, documents * n, schedule_for(chosen, settings.config, documents * n, rows, settings.tile))
          .peak;
    };
    if (needed(wanted) <= room) return wanted;
    const Index fits = longest_for_budget(settings, chosen, rows, room) / documents / kTile * kTile;
    require(fits > 0, "training this model needs ", human_bytes(needed(kTile)), " for the shortest documents, and ",
            human_bytes(room), memory.empty() ? " are free" : " are what --memory allows",
            "; use a smaller model, or one of the narrower --dtype and --optimizer");
    return fits;
  }

  // Documents that are longer are cut.
  Index longest_piece() const {
    const Config& c = settings.config;
    return c.positions == Positions::learned ? std::min(length, c.max_length) : length;
  }

  static Mode mode_named(const std::string& mode) {
    return mode == "full" ? Mode::full : mode == "checkpoint" ? Mode::checkpoint : Mode::stream;
  }
  Index mode_chunk() const { return given("--chunk") ? chunk : default_chunk(settings.tile); }

  Schedule choose_schedule() {
    const Index rows = documents * length;
    const Mode chosen = mode_named(mode);
    require(chosen == Mode::stream || (!given("--chunk") && memory.empty()),
            "--chunk and --memory belong to --mode stream; ", mode, " mode has the whole stream as its chunk");
    chunk = mode_chunk();
    if (!memory.empty()) {
      const std::size_t budget = parse_bytes(memory);
      chunk = chunk_for_budget(settings, rows, budget);
      require(chunk > 0, "a step needs at least ",
              human_bytes(plan(settings, rows, schedule_of(chosen, settings.tile)).peak), ", more than --memory ",
              memory, "; give more, or a smaller --batch, --length or model");
    }
    check_chunk(chunk, settings.tile);
    const Schedule schedule = schedule_of(chosen, chunk);
    require_room(settings, chosen, rows, chunk, plan(settings, rows, schedule).peak, free_memory(settings.device));
    return schedule;
  }

  Schedule schedule_of(Mode mode, Index chunk) const {
    return schedule_for(mode, settings.config, documents * length, chunk, settings.tile);
  }

  // What the run will allocate: a step, an evaluation and a sample, each run on the Plan device. As many completions of a
  // round grow at once as fit where the step has its room.
  std::size_t capacity(const Schedule& schedule) {
    if (rounds()) {
      const std::size_t room = planned(schedule, 0);
      sampled->slots = std::max<Index>(
          1, largest(sampled->completions(), [&](Index slots) { return planned(schedule, slots) <= room; }));
    }
    return planned(schedule, rounds() ? sampled->slots : 0);
  }

  std::size_t planned(const Schedule& schedule, Index slots) const {
    const GenerationShape sample = sample_length > 0 ? GenerationShape{1, length} : GenerationShape{};
    return plan_run(settings, documents * length, schedule,
                    slots > 0 ? GenerationShape{slots, sampled->longest()} : sample);
  }

  // What the starting model gives the tokens of the data: found where an earlier run left it, or computed now.
  void attach_reference(Engine& engine, Source& source, const Schedule& schedule, const fs::path& checkpoint) {
    const TokenFile& file = *token_file;
    const std::vector<fs::path> places = {fs::absolute(data[0]).parent_path(), out};
    const Index longest = std::min(length, longest_piece());
    const auto key_of = [&] {
      return reference_key(file, model_directory(model.model), name(settings.dtype), longest);
    };
    reference = checkpoint.empty() ? key_of() : reference_of(checkpoint);
    auto logp = find_reference(places, reference, file);
    if (!logp) {
      require(reference == key_of(), model.model, ": is not the model any more that the run in ", out,
              " started from, whose log-probabilities are needed; bring it back, or ", reference_name(reference));
      engine.load(model_directory(model.model));
      logp = compute_reference(
          file, longest, documents * length, [&](const Batch& batch) { return engine.evaluate(batch, schedule); },
          [](double part) {
            if (!isatty(STDOUT_FILENO)) return;
            std::printf(part < 1 ? "\r\033[Kthe starting model reads the data: %.0f%%" : "\r\033[K", 100 * part);
            std::fflush(stdout);
          });
      save_reference(places, reference, *logp);
    }
    packed->attach(*logp);
    source.evaluation = packed->evaluation;
  }

  Index resume_from(const fs::path& checkpoint, const Source& source, Engine& engine) {
    const Json json = parse_json_file(checkpoint / "training/state.json");
    const Fields state(json, (checkpoint / "training/state.json").string());
    require(state.get<std::string>("data") == source.fingerprint, source.description,
            ": the data has changed since the run in ", out, " began; bring the old data back, or start a new run");
    require(config_to_json(read_config(checkpoint)) == config_to_json(settings.config),
            (checkpoint / "config.json").string(), ": is not the model that ", state.file, " describes");
    engine.restore(checkpoint, *layout);
    const Index step = state.get<Index>("step");
    require(checkpoint.filename() == checkpoint_name(step) && step <= optimizer.steps, state.file, ": step ", step,
            " does not belong to this checkpoint; the file is damaged, use an earlier checkpoint");
    return step;
  }

  void announce(const Source& source, const Schedule& schedule, std::size_t capacity, Index step) const {
    const std::string chunked = mode == "stream" ? format(", chunks of %ld rows", schedule.chunk) : "";
    std::printf("model    %s\n", describe(settings.config).c_str());
    std::printf("data     %s\n", source.description.c_str());
    std::printf("steps    %ld, of %ld x %ld tokens x %ld micro-batches; rate %g\n", optimizer.steps, documents, length,
                micro_batches, optimizer.rate);
    std::printf("memory   %s, planned: mode %s%s\n", human_bytes(capacity).c_str(), mode.c_str(), chunked.c_str());
    std::printf("machine  %s, %s, matmul at %.0f GFLOP/s\n", device_name(settings.device).c_str(), name(settings.dtype),
                machine_rate / 1e9);
    if (fine_tunes() && settings.config.max_length > 0 &&
        std::min(longest_piece(), longest_document) > settings.config.max_length) {
      std::printf("note     there are documents longer than the %ld tokens that the model was made for\n",
                  settings.config.max_length);
    }
    std::printf("output   %s%s\n\n", out.c_str(), step > 0 ? format(", resumed after step %ld", step).c_str() : "");
    std::fflush(stdout);
  }

  // --- In the loop ---

  void report(Index step, Index last, const std::vector<Batch>& batches, const StepResult& result,
              const DeviceBase& dev, double seconds) {
    Index tokens = 0;
    for (const Batch& batch : batches) tokens += batch.size();
    const double tokens_per_second = static_cast<double>(tokens) / seconds;
    const double utilisation = dev.flops() / seconds / machine_rate;
    const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    const double left = elapsed / static_cast<double>(step - first_step) * static_cast<double>(last - step);
    Json line = {{"step", step},
                 {"loss", result.measures.loss},
                 {"gradient_norm", result.gradient_norm},
                 {"rate", learning_rate(optimizer, step)},
                 {"tokens_per_second", tokens_per_second},
                 {"utilisation", utilisation},
                 {"memory", dev.arena.peak()},
                 {"seconds", seconds}};
    for (const auto& [measure, value] : result.measures.others) line[measure] = value;
    directory->write_metrics(line);
    // A terminal shows every step on one line; a file gets a line now and then.
    const bool terminal = isatty(STDOUT_FILENO);
    const Index interval = std::max<Index>(1, (last - first_step) / 20);
    const bool lasting = step == last || step % interval == 0;
    if (!terminal && !lasting) return;
    std::printf("%s%*ld/%ld  loss %.4f%s  norm %.2f  %s tok/s  %2.0f%% matmul  %s  %ld:%02ld left%s",
                terminal ? "\r\033[K" : "", static_cast<int>(std::to_string(last).size()), step, last,
                result.measures.loss, shown(result.measures).c_str(), result.gradient_norm,
                human_count(tokens_per_second).c_str(), 100 * utilisation, human_bytes(dev.arena.peak()).c_str(),
                static_cast<Index>(left) / 60, static_cast<Index>(left) % 60, lasting ? "\n" : "");
    std::fflush(stdout);
  }

  static std::string shown(const Measures& measures) {
    std::string text;
    for (const char* name : {"accuracy", "margin", "reward", "length", "kl", "clip_fraction"}) {
      const auto found = measures.others.find(name);
      if (found != measures.others.end()) text += format("  %s %.3f", name, found->second);
    }
    return text;
  }

  // The held-out loss; and of SFT how it falls along a document: a model that uses its context does better late than
  // early.
  void evaluate(Engine& engine, const Source& source, const Schedule& schedule, Index step) {
    if (rounds()) return evaluate_rewards(engine, step);
    Counts all;
    for (const Batch& batch : source.evaluation) all += Counts(batch);
    if (all.targets == 0) return;
    Measures sum;
    double losses[2] = {0, 0};  // in the first and the second half of a document
    Index counts[2] = {0, 0};
    for (const Batch& batch : source.evaluation) {
      const auto logp = engine.evaluate(batch, schedule);
      sum += measure(settings.objective, batch, all, logp);
      const std::vector<std::int32_t> lengths = batch.document_lengths();
      for (std::size_t t = 0; t < logp.size(); ++t) {
        if (batch.targets[t] < 0) continue;
        const int half = 2 * batch.positions[t] >= lengths[t];
        losses[half] -= static_cast<double>(logp[t]);
        ++counts[half];
      }
    }
    require(std::isfinite(sum.loss), "after step ", step, " the held-out loss is ", sum.loss,
            "; the weights are ruined and were not saved. Try a lower --rate or a longer --warmup; ",
            directory->last_checkpoint());
    Json line = {{"step", step}, {"evaluation_loss", sum.loss}};
    std::string details = shown(sum);
    if (settings.objective.kind == ObjectiveKind::sft) {
      for (int half : {0, 1}) losses[half] /= static_cast<double>(std::max<Index>(1, counts[half]));
      line["first_half"] = losses[0], line["second_half"] = losses[1];
      details = format(" (documents' first half %.4f, second %.4f)", losses[0], losses[1]);
    }
    for (const auto& [measure, value] : sum.others) line["evaluation_" + measure] = value;
    directory->write_metrics(line);
    std::printf("%safter step %ld: held-out loss %.4f%s\n", isatty(STDOUT_FILENO) ? "\r\033[K" : "", step, sum.loss,
                details.c_str());
    std::fflush(stdout);
  }

  void evaluate_rewards(Engine& engine, Index step) {
    const double reward = sampled->evaluate(engine);
    if (std::isnan(reward)) return;
    directory->write_metrics({{"step", step}, {"evaluation_reward", reward}});
    std::printf("%safter step %ld: held-out reward %.3f\n", isatty(STDOUT_FILENO) ? "\r\033[K" : "", step, reward);
    std::fflush(stdout);
  }

  // What --resume restores.
  Json options() {
    Json all;
    for_each_lasting([&](const char* name, auto& value) { all[name] = value; });
    return all;
  }

  void save(Engine& engine, const Source& source, Index step, RunDirectory::Keep keep) {
    Json state;
    state["step"] = step;
    state["data"] = source.fingerprint;
    if (!reference.empty()) state["reference"] = reference;
    state["options"] = options();
    const fs::path saved = directory->save(engine, *layout, state, keep);
    if (step == optimizer.steps || step == stop_after) std::printf("saved    %s\n", saved.c_str());
  }

  // --- After the loop ---

  void sample(Engine& engine) {
    if (prompt.empty()) prompt = text->prompt();
    const Index room = length - 1;
    const std::string begin = prompt.substr(0, static_cast<std::size_t>(room));
    Tokens tokens;
    std::string shown;
    for (unsigned char byte : begin) tokens.push_back(byte), shown += static_cast<char>(printable(byte));
    std::printf("\nA sample, continuing \"%s\":\n\n%s", shown.c_str(), shown.c_str());
    GenerationSettings settings{{.temperature = temperature, .seed = seed}};
    settings.length = std::min(sample_length, length - static_cast<Index>(begin.size()));
    engine.generator(1, length, kTile)->generate({tokens}, settings, [](std::size_t, const Continuation& text) {
      std::printf("%c", printable(text.tokens.back()));
      std::fflush(stdout);
    });
    std::printf("\n");
  }

  // Single bytes make no valid UTF-8, and control characters would command the terminal.
  static int printable(std::int32_t token) {
    return (32 <= token && token < 127) || token == '\n' || token == '\t' ? token : '?';
  }

  StepSettings settings;
  std::optional<ModelLayout> layout;
  std::shared_ptr<const Text> text;  // from scratch
  std::optional<TokenFile> token_file;
  std::shared_ptr<Documents> packed;
  std::unique_ptr<Groups> sampled;
  std::string reference;  // where the objective needs the starting model: what tells it and its answers apart
  Index longest_document = 0;
  std::optional<RunDirectory> directory;
  double machine_rate = 0;
  Clock::time_point start;
  Index first_step = 0;
};

}  // namespace streambp

int main(int argc, char** argv) {
  using namespace streambp;
  set_up_process(argv);
  CLI::App app{
      "streambp: exact backpropagation of long sequences in little memory.\n\n"
      "  streambp train           train a model (without options: a small one, in about a minute)\n"
      "  streambp verify          prove that the gradient is the full-memory gradient, bit for bit\n"
      "  streambp plan MODEL      tell the memory and work of a training step at any length\n"
      "  streambp bench           measure the speed of a training step\n"
      "  streambp tokenize        turn data into the tokens that a model is trained on\n"
      "  streambp eval            measure a model's loss on documents, and by position in them\n"
      "  streambp generate        let a model continue prompts, or talk with it\n"
      "  streambp examples        write example data, to try things out with\n\n"
      "Each has a --help of its own. Exit codes: 0 done, 1 a verification failed, 2 something to mend."};
  app.require_subcommand(1);
  app.get_formatter()->column_width(28);
  std::vector<std::unique_ptr<Command>> commands;
  commands.push_back(std::make_unique<TrainCommand>(app));
  for (const auto make : {verify_command, plan_command, bench_command, tokenize_command, eval_command, generate_command,
                          examples_command}) {
    commands.push_back(make(app));
  }
  for (CLI::App* command : app.get_subcommands({})) command->group("");  // the text above lists them
  try {
    app.parse(argc, argv);
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) fail("cannot write to standard output; is the disk full?");
    int exit_code = 0;
    for (const auto& command : commands) exit_code = std::max(exit_code, command->exit_code);
    return exit_code;
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help
    std::cerr << "streambp: " << e.what() << "\nSee " << (argc > 1 ? "streambp " + std::string(argv[1]) : "streambp")
              << " --help\n";
  } catch (const std::bad_alloc&) {
    std::cerr << "streambp: out of host memory\n";
  } catch (const std::exception& e) {
    std::cerr << "streambp: " << without_controls(e.what()) << "\n";
  }
  return 2;
}
