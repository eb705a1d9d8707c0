// streambp generate: completions of prompts, or a chat.

#include "commands/chat.h"
#include "commands/chat_options.h"
#include "commands/command.h"
#include "commands/device_options.h"
#include "commands/display.h"
#include "commands/part_options.h"
#include "data/files/checkpoint.h"
#include "data/files/results.h"
#include "training/plan.h"

namespace streambp {
namespace {

constexpr const char* kGenerateDescription =
    "Continue prompts, or chat.\n\n"
    "  streambp generate --model qwen3-0.6b/                         a conversation\n"
    "  streambp generate --model gpt2/ --prompt \"Once upon a time\" --samples 3\n"
    "  streambp generate --model qwen3-0.6b/ --chat --prompts questions.txt\n\n"
    "Without prompts, it chats on a terminal, in the layout of the model's chat template; otherwise one prompt is "
    "read from standard input. In a chat, /help lists the commands. Sampling defaults come from the "
    "model's generation_config.json. The same seed gives the same text. Reasoning is dim on a terminal, and apart "
    "from the text with --json.";

class GenerateCommand : public Command {
 public:
  explicit GenerateCommand(CLI::App& app) : Command(app, "generate", kGenerateDescription) {
    source.add_to(options);
    device.add_to(options, {"auto", "f32", "bf16"}, DeviceOptions::Optimizers::none);
    device.optimizer = "none";

    options.section("Prompts");
    options.add("--prompt", &prompts, "One or more prompts");
    options.add("--prompts", &prompt_file,
                "A file of prompts, one per line; .jsonl or .json: objects with \"prompt\" or "
                "\"messages\"");
    options.add_with_optional_value("--chat", &chat.given, std::string("Prompts are user messages. ") + kChatHelp);
    add_rendering_options(options, chat);
    options.add("--system", &system, "System message of conversations; implies --chat");
    options.add("--tools", &tools_file, "Tools of conversations: a JSON list of functions; implies --chat");
    options.add("--samples", &samples, "Completions of each prompt", checks::between(1, 1 << 20));

    options.section("Sampling");
    options.add("--length", &length, "Maximum tokens of a completion", checks::between(1, 1 << 24));
    options.add("--temperature", &sampling.temperature, "0: greedy decoding", checks::not_negative(),
                "from generation_config.json, else 0.8");
    options.add("--top-k", &sampling.top_k, "Sample from the k most likely tokens; 0: all tokens", {},
                "from generation_config.json, else 0");
    options.add("--top-p", &sampling.top_p, "Sample from the smallest set of tokens with this total probability", {},
                "from generation_config.json, else 0.95");
    options.add("--repetition-penalty", &sampling.repetition_penalty,
                "Divides the positive logits of tokens that the text has already, and multiplies the negative ones", {},
                "from generation_config.json, else 1");
    options.add("--stop", &stop_texts, "Texts before which a completion ends, such as $'\\n'",
                [](const std::string& text) { return text.empty() ? "is empty; write a text" : ""; });
    options.add("--seed", &sampling.seed, "Random seed");

    options.section("Output");
    options.add("--json", &json_file, "Write prompts, completions, tokens and log-probs to this file",
                checks::results_file());
    options.add("--raw", &raw, "Show special tokens and control characters");
    options.add("--stats", &stats, "Show how fast weights were loaded, and compare the speed with memory bandwidth");
    options.first_page({"--model", "--adapter", "--base", "--prompt", "--prompts", "--chat", "--system", "--samples",
                        "--length", "--temperature", "--top-k", "--top-p", "--stop", "--seed", "--json"});
  }

 private:
  void run() override {
    if (json_file.empty()) signal(SIGPIPE, SIG_DFL);  // stop when the reader does
    source.resolve();
    config = source.config();
    model = source.model;
    require(has_file(fs::path(model) / "tokenizer.json"), model,
            ": has no tokenizer.json, so text cannot become tokens; copy the model's tokenizer.json there");
    choose_sampling();
    prompter.emplace(model, chat, system, read_tools(tools_file));
    for (const std::int32_t id : prompter->stop)
      require(id < config.vocab, model, ": \"eos_token_id\" ", id, " in generation_config.json or config.json is ",
              "outside the model's vocabulary of ", config.vocab, "; mend the file");
    for (const std::string& text : stop_texts)  // the texts of special tokens are not shown
      if (const auto id = prompter->tokenizer.find(text); id && prompter->tokenizer.special(*id))
        prompter->stop.insert(*id);
    const bool converses = prompts.empty() && prompt_file.empty() && isatty(STDIN_FILENO);
    if (options.given("--chat") || !system.empty() || !tools_file.empty() ||
        (converses && !read_template(model).text.empty())) {
      prompter->open_chat();
      reasoning = reasoning_marks(prompter->chat->source());
      require(tools_file.empty() || prompter->chat->source().find("tools") != std::string::npos, "--tools: the chat ",
              "template ", prompter->chat->name(), " writes no tools; use a model that was trained with them");
    }
    require(prompter->chat || chat.arguments.empty(),
            "--template-arg: prompts are plain text here, without a chat template; add --chat");
    step = device.settings(config, 1);
    chunk = default_chunk(step.tile);
    if (converses) {
      require(json_file.empty() && samples == 1, "--json and --samples need prompts; a chat has none");
      return converse();
    }
    answer(gather_prompts());
  }

  // --- Sampling and prompts ---

  void choose_sampling() {
    const GenerationDefaults defaults = read_generation_defaults(model);
    if (!options.given("--temperature")) sampling.temperature = defaults.sampling.temperature;
    if (!options.given("--top-k")) sampling.top_k = defaults.sampling.top_k;
    if (!options.given("--top-p")) sampling.top_p = defaults.sampling.top_p;
    if (!options.given("--repetition-penalty")) sampling.repetition_penalty = defaults.sampling.repetition_penalty;
    validate(sampling);
  }

  std::vector<Prompt> gather_prompts() {
    std::vector<Prompt> all;
    auto add = [&](Prompt p, const std::string& where) {
      check(p.tokens, where);
      all.push_back(std::move(p));
    };
    for (const std::string& text : prompts) add(prompter->text(text), "--prompt \"" + text.substr(0, 40) + "\"");
    if (!prompt_file.empty()) {
      const auto add_all = [&](auto&& lines, auto&& prompt_of) {
        for (std::string line; lines.next(line);) {
          if (line.find_first_not_of(" \t") == std::string::npos) continue;
          try {
            add(prompt_of(line), lines.where() + "the prompt");
          } catch (const BadData& error) {
            fail(lines.where(), error.what());
          }
        }
      };
      if (holds_json(prompt_file)) {
        add_all(JsonValues(prompt_file), [&](const std::string& line) { return prompter->line(line); });
      } else {
        add_all(Lines(prompt_file), [&](const std::string& line) { return prompter->text(line); });
      }
      require(!all.empty(), prompt_file, ": has no prompts; write one per line");
    }
    if (all.empty()) {
      std::string text = read_input();  // its last line may have an end
      if (text.ends_with('\n')) text.resize(text.size() - (text.ends_with("\r\n") ? 2 : 1));
      add(prompter->text(text), "standard input");
    }
    return all;
  }

  static std::string read_input() {
    std::string text, block(1 << 16, '\0');
    while (std::cin.read(block.data(), 1 << 16), std::cin.gcount() > 0) {
      text.append(block, 0, index(std::cin.gcount()));
      require(text.size() <= kLongestText, "standard input: has more than ", kLongestText,
              " bytes; shorten the prompt, or give many in a file with --prompts");
    }
    return text;
  }

  // The tokens that the model was trained on, and the longest sequence that it can read. With RoPE that has no limit.
  Index context() const { return config.max_length > 0 ? config.max_length : kLongestStream; }
  Index limit() const { return config.positions == Positions::learned ? config.max_length : kLongestStream; }

  // Completions end with the context, unless a prompt or --length goes beyond it.
  Index room_for(Index longest) const {
    const bool beyond = longest >= context() || options.given("--length");
    const Index room = std::min(longest + length, beyond ? limit() : context());
    if (room > context())
      print_error("note: up to %ld tokens are more than the model's context of %ld\n", room, context());
    return room;
  }

  void check(const Tokens& tokens, const std::string& where) const {
    require(!tokens.empty(), where, ": is empty, and the model has no BOS token; write a word or two");
    require(static_cast<Index>(tokens.size()) <= limit(), where, ": has ", tokens.size(),
            " tokens, more than the model's ", limit(), " positions; shorten it");
    for (std::int32_t token : tokens) {
      require(0 <= token && token < config.vocab, where, ": token ", token, " (\"",
              prompter->tokenizer.decode({&token, 1}), "\") is outside the model's vocabulary of ", config.vocab,
              "; is ", model, "/tokenizer.json this model's?");
    }
  }

  // --- Completions ---

  void answer(const std::vector<Prompt>& asked) {
    std::vector<Tokens> tokens;
    std::vector<std::string> headings;
    Index longest = 0;
    for (const Prompt& p : asked) {
      longest = std::max(longest, static_cast<Index>(p.tokens.size()));
      for (Index sample = 1; sample <= samples; ++sample) {
        tokens.push_back(p.tokens);
        const std::string number = samples > 1 ? format(" (%ld)", sample) : "";
        headings.push_back(asked.size() * index(samples) == 1 ? "" : "--- " + p.text + number + "\n");
      }
    }
    const Index room = room_for(longest);
    step.config.rope_scaling.longest = room;
    GenerationShape shape = {1, room, chunk, samples, longest, length};
    shape.slots = fitting_slots(static_cast<Index>(tokens.size()), shape);
    with_generator(shape, [&](TextGenerator& generator) {
      Display display(room, raw);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        display.open(headings[i], growing(tokens[i]));
      }
      GenerationTime watch;
      const auto texts = generator.generate(tokens, settings(), [&](std::size_t number, Continuation& text) {
        watch.drawn(generator.steps());
        display.add(number, text);
      });
      watch.stop(generator.steps());
      report(watch);
      if (!json_file.empty()) write_json(asked, texts, display);
    });
  }

  // The answer to a prompt.
  GrowingText growing(const Tokens& prompt) const {
    const bool chats = prompter->chat.has_value();
    return {prompter->tokenizer, raw, chats ? Tokens() : prompt,
            chats ? opened(reasoning, prompter->tokenizer.decode(prompt)) : ReasoningMarks(), stop_texts};
  }

  GenerationSettings settings() const { return {sampling, length, prompter->stop}; }

  std::size_t memory(const GenerationShape& shape) const { return plan_generation(step, shape); }
  std::size_t memory_of_one(Index room) const { return memory({1, room, chunk}); }

  // The number of sequences in parallel that fit into memory.
  Index fitting_slots(Index texts, GenerationShape shape) const {
    const Index most = step.device == DeviceKind::cuda ? 256 : 16;  // more gain little on a CPU
    const std::size_t free = free_memory(step.device);
    const Index slots = largest(std::min(texts, most), [&](Index n) {
      shape.slots = n;
      return memory(shape) <= free;
    });
    if (slots > 0) return slots;
    const Index longest = largest(shape.room, [&](Index n) { return memory_of_one(n) <= free; });
    const std::string needs = format("a sequence of %ld tokens needs %s, and %s are free", shape.room,
                                     human_bytes(memory_of_one(shape.room)), human_bytes(free));
    require(longest > 0, needs, "; use a smaller model", step.dtype == DType::bf16 ? "" : " or --dtype bf16");
    fail(needs, ": there is room for ", longest, " tokens; give a shorter prompt or --length");
  }

  template <class F>
  void with_generator(const GenerationShape& shape, F&& f) {
    const auto engine = make_engine(step, 0, memory(shape));
    const Stopwatch watch;
    const std::size_t bytes = engine->load(model, source.adapter);
    if (stats)
      print_error("[loaded %s of weights at %.1f GB/s]\n", human_bytes(bytes),
                  static_cast<double>(bytes) / watch.seconds() * 1e-9);
    f(*engine->generator(shape));
  }

  void write_json(const std::vector<Prompt>& asked, const std::vector<Continuation>& texts,
                  const Display& display) const {
    const char* endings[] = {"", "stop", "length", "context", "stop_text"};
    Json json = {{"model", model},          {"temperature", sampling.temperature},
                 {"top_k", sampling.top_k}, {"top_p", sampling.top_p},
                 {"seed", sampling.seed},   {"repetition_penalty", sampling.repetition_penalty},
                 {"texts", Json::array()}};
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const Prompt& p = asked[i / index(samples)];
      const auto [thought, answer] = display.text(i);
      json["texts"].push_back({{"prompt", p.text},
                               {"prompt_tokens", p.tokens},
                               {"text", answer},
                               {"reasoning", thought},
                               {"tokens", texts[i].tokens},
                               {"logp", std::accumulate(texts[i].logps.begin(), texts[i].logps.end(), 0.0)},
                               {"logps", texts[i].logps},
                               {"end", endings[static_cast<int>(texts[i].end)]}});
    }
    write_results(json_file, std::move(json));
  }

  // --- Chat ---

  void converse() {
    constexpr Index least = 64, most = 32768;  // tokens of context
    const std::size_t free = free_memory(step.device);
    const Index wanted = config.max_length > 0 ? std::min(config.max_length, most) : most;
    step.config.rope_scaling.longest = wanted;  // whatever memory there is
    const Index room = largest(wanted, [&](Index n) { return memory_of_one(n) <= free; });
    if (room < std::min(least, wanted)) fitting_slots(1, {1, std::min(least, wanted), chunk});  // reports the shortage
    with_generator({1, room, chunk}, [&](TextGenerator& generator) {
      print(
          "%s%s, context of %ld tokens. /help lists the commands.\n", model,
          prompter->chat ? ", chat template " + prompter->chat->name() : ": no chat template, so each line is a prompt",
          room);
      const auto check = [&](const Tokens& tokens) { this->check(tokens, "the line"); };
      const auto growing = [&](const Tokens& prompt) { return this->growing(prompt); };
      const auto report = [&](const GenerationTime& watch) {
        if (stats) this->report(watch);
      };
      TerminalChat{generator, *prompter, settings(), check, growing, report}.run();
    });
  }

  // --- Speed ---

  void report(const GenerationTime& watch) const {
    const double after = watch.all - watch.first;
    std::string line = format("[%ld tokens in %.2f s, the first after %.2f s", watch.tokens, watch.all, watch.first);
    if (watch.tokens > 1 && watch.steps > 0) {
      line += format("; then %.1f tokens/s", static_cast<double>(watch.tokens - 1) / after);
      if (stats) {
        const double bytes = bytes_of_step(ceil_div(watch.tokens, watch.steps + 1)), rate = read_rate(step.device);
        const double step_seconds = after / static_cast<double>(watch.steps);
        line += format("; %.2f ms per step, %.2f of memory bandwidth (%.2f ms to read %s of weights at %.1f GB/s)",
                       1e3 * step_seconds, bytes / rate / step_seconds, 1e3 * bytes / rate,
                       human_bytes(static_cast<std::size_t>(bytes)), rate / 1e9);
      }
    }
    std::fflush(stdout);
    print_error("%s]\n", line);
  }

  // The most bytes of weights that one step reads. It reads only a few rows of an embedding table, unless the table is tied
  // and so also the head, and no more experts than its sequences can choose.
  double bytes_of_step(Index sequences) const {
    Config used = config;
    used.experts_per_token = least(config.experts, sequences * config.experts_per_token);
    Index numbers = active_parameters(used);
    if (!config.tied) numbers -= config.vocab * config.hidden;
    if (config.positions == Positions::learned) numbers -= config.max_length * config.hidden;
    double quantised = 0, bytes = 0;
    Tensors<float> none(used);
    for (const auto& e : table(used, none))
      if (e.quantised) {
        const auto active = static_cast<double>(active_numbers(e.parameter, used));
        quantised += active, bytes += active * e.quantised->bytes_of_weight();
      }
    return (static_cast<double>(numbers) - quantised) * (step.dtype == DType::bf16 ? 2 : 4) + bytes;
  }

  ModelSource source;
  std::string model, prompt_file, system, tools_file, json_file;
  ChatOptions chat;
  std::vector<std::string> prompts, stop_texts;
  DeviceOptions device;
  Sampling sampling;
  Index length = 256, samples = 1, chunk = 512;
  bool raw = false, stats = false;

  Config config;
  StepSettings step;
  std::optional<Prompter> prompter;
  ReasoningMarks reasoning;
};

}  // namespace

std::unique_ptr<Command> generate_command(CLI::App& app) { return std::make_unique<GenerateCommand>(app); }

}  // namespace streambp
