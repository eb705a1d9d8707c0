// streambp tokenize: tokenises data, ahead of training or for inspection.
#include <omp.h>
#include "commands/chat_options.h"
#include "commands/command.h"
#include "commands/display.h"
#include "commands/step_progress.h"
#include "commands/text.h"
#include "data/documents/data_checks.h"
#include "data/files/checkpoint.h"

namespace streambp {
namespace {

constexpr const char* kTokenizeDescription =
    "Tokenise data for training.\n\n"
    "  streambp tokenize --model qwen3-0.6b/ --data chats.jsonl --out chats.safetensors --show 3\n\n"
    "Data files and folders: .jsonl with one object per line, or .json with a list of them,\n"
    "  {\"messages\": [{\"role\": \"user\", \"content\": \"...\"}, {\"role\": \"assistant\", \"content\": \"...\"}]}\n"
    "  {\"prompt\": \"...\", \"completion\": \"...\"}   or   {\"text\": \"...\"}\n"
    "  {\"prompt\": \"...\", \"chosen\": \"...\", \"rejected\": \"...\"}              preferences\n"
    "  {\"prompt\": \"...\", \"completions\": [\"...\", ...], \"rewards\": [1, ...]}  groups\n"
    "llm.c's .bin, token files (.safetensors), and any other file as one text; also .gz and .zst. All data must be of\n"
    "one kind, and all examples of a file of one form. The loss covers answers, completions and texts. Conversations\n"
    "are rendered by the model's chat template. Where it drops parts of earlier answers, such as reasoning, each of\n"
    "these becomes a separate document.";

class TokenizeCommand : public Command {
 public:
  explicit TokenizeCommand(CLI::App& app) : Command(app, "tokenize", kTokenizeDescription) {
    options.add("--model", &model, "The model's directory, with its tokenizer.json");
    options.add("--data", &data, "Data: files and folders; to mix them by weight in training: a.jsonl:0.7 b.jsonl:0.3");
    options.add("--out", &out, "The token file to write (.safetensors)");
    for (const char* flag : {"--model", "--data", "--out"}) options.require(flag);
    add_chat_options(options, data_options.chat);
    options.add("--learn", &learn, "Tokens in the loss: answers, or all", checks::one_of({"answers", "all"}));
    options.add("--skip-bad", &data_options.skip_bad, "Skip unusable lines instead of stopping at the first");
    options.add("--show", &shown, "Print the first documents, with the tokens in the loss marked",
                checks::between(0, 1 << 30));
    options.add("--render", &rendered, "Also write each document's text, learned spans and tokens to this JSONL file");
  }

 private:
  void run() override {
    require(extension_of(out) == ".safetensors", "--out ", out,
            ": a token file is a safetensors file; name it .safetensors");
    require_replaceable(out);
    if (!rendered.empty()) {
      require_writable(rendered);
      require(!fs::exists(rendered), "--render ", rendered, ": exists already; remove it, or name another file");
    }
    if (learn == "all") data_options.learn = Learn::all;
    model = model_directory(model);
    const Stopwatch watch;
    write_tokens(data_parts(data), model, data_options, out);
    const double seconds = watch.seconds();

    const TokenFile file(out);
    const Tokenizer tokenizer = read_tokenizer(model);
    file.require_vocabulary(file.groups() ? INT32_MAX : tokenizer.size());  // sampled tokens may have no text
    const Index units = file.documents() / file.together();
    for (Index i = 0; i < std::min(shown, units) * file.together(); ++i) show(tokenizer, file, i);
    if (!rendered.empty()) {
      write_file_atomically(rendered, [&](std::ostream& lines) {
        for (Index i = 0; i < file.documents(); ++i) lines << text_of(rendering(tokenizer, file, i)) << "\n";
      });
    }
    const auto tokens = static_cast<double>(file.token_count()), learned = static_cast<double>(file.learned_count());
    const char* unit = kDataUnits[static_cast<int>(file.kind())];
    print("%s: %s, %s, %ld of them in the loss (%.1f%%), the longest %s %s\n", out, counted(units, unit),
          counted(file.token_count(), "token"), file.learned_count(), 100 * learned / tokens, unit,
          counted(file.longest_together(), "token"));
    print("%s tokens/s on %s\n", human_count(tokens / seconds), counted(omp_get_max_threads(), "thread"));
    for (const TokenPart& part : file.parts)
      print("%s: %s%s\n", part.name, counted(part.documents / file.together(), unit),
            part.form.empty() ? "" : (" with " + part.form));
    for (const std::string& text : DataChecks(file, model, data_options).warnings()) print("%s\n", text);
    if (const std::string skipped = file.skipped(); !skipped.empty()) print("%s\n", skipped);
  }

  // A document as JSON: its text, the learned parts of it as [begin, end) in bytes, and its tokens.
  static OrderedJson rendering(const Tokenizer& tokenizer, const TokenFile& file, Index i) {
    const auto tokens = file.tokens(i);
    const auto learn = file.learn(i);
    StreamingDecoder decoder(tokenizer);
    std::string text;
    OrderedJson spans = OrderedJson::array();
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const std::size_t begin = text.size();
      text += decoder.add(tokens[t]);
      if (!learn[t]) continue;
      if (t == 0 || !learn[t - 1]) spans.push_back({begin, begin});
      spans.back()[1] = text.size();
    }
    text += decoder.finish();
    return {{"text", text}, {"learned", spans}, {"tokens", std::vector(tokens.begin(), tokens.end())}};
  }

  // Tokens in the loss are highlighted on a terminal, and between ⟦ ⟧ elsewhere. Special tokens are blue there.
  static void show(const Tokenizer& tokenizer, const TokenFile& file, Index i) {
    const bool terminal = isatty(STDOUT_FILENO);
    const auto tokens = file.tokens(i);
    const auto learn = file.learn(i);
    const std::string what = file.preferences() ? format(", %s", i % 2 ? "rejected" : "chosen")
                             : file.groups()    ? format(", advantage %.3f", file.advantage(i).scaled)
                                                : "";
    print("--- %s %ld%s, %s ---\n", kDataUnits[static_cast<int>(file.kind())], i / file.together() + 1, what,
          counted(file.length(i), "token"));
    for (std::size_t begin = 0, end = 0; begin < tokens.size(); begin = end) {
      while (end < tokens.size() && learn[end] == learn[begin]) ++end;
      const Escape none{""}, open{terminal ? "\033[30;42m" : "⟦"}, close{terminal ? "\033[0m" : "⟧"};
      print("%s", learn[begin] ? open : none);
      for (std::size_t t = begin, next = begin; t < end; t = next) {
        const bool special = terminal && tokenizer.special(tokens[t]);
        while (next < end && (terminal && tokenizer.special(tokens[next])) == special) ++next;
        const std::string text = without_controls(tokenizer.decode(tokens.subspan(t, next - t)));
        print("%s%s%s", Escape{special ? "\033[34m" : ""}, Escape{text}, Escape{special ? "\033[39m" : ""});
      }
      print("%s", learn[begin] ? close : none);
    }
    print("\n");
  }

  std::string model, out, rendered, learn = "answers";
  std::vector<std::string> data;
  DataOptions data_options = {.progress = show_progress};
  Index shown = 0;
};

}  // namespace

std::unique_ptr<Command> tokenize_command(CLI::App& app) { return std::make_unique<TokenizeCommand>(app); }

}  // namespace streambp
