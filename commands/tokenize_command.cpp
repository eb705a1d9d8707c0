// streambp tokenize: data as the tokens that a model is trained on, ahead of training and to look at.
#include "commands/command.cuh"
#include "commands/display.cuh"
#include "commands/options.cuh"
#include "data/documents/tokenised.cuh"
#include "data/files/checkpoint.cuh"

namespace streambp {
namespace {

class TokenizeCommand : public Command {
 public:
  explicit TokenizeCommand(CLI::App& parent) {
    CLI::App& app = *parent.add_subcommand(
        "tokenize",
        "Turn data into the tokens that a model is trained on.\n\n"
        "  streambp tokenize --model qwen3-0.6b/ --data chats.jsonl --out chats.safetensors --show 3\n\n"
        "Data files: .jsonl with one object a line,\n"
        "  {\"messages\": [{\"role\": \"user\", \"content\": \"...\"}, {\"role\": \"assistant\", \"content\": "
        "\"...\"}]}\n"
        "  {\"prompt\": \"...\", \"completion\": \"...\"}   or   {\"text\": \"...\"}\n"
        "  {\"prompt\": \"...\", \"chosen\": \"...\", \"rejected\": \"...\"}   a preference; then all of the data are\n"
        "  {\"prompt\": \"...\", \"completions\": [\"...\", ...], \"rewards\": [1, ...]}   a group; all of them, too\n"
        "llm.c's .bin, token files (.safetensors), and any other file as one text. Learned are answers, completions "
        "and\n"
        "texts. Conversations are written in the layout of the model's own chat template; where a layout writes "
        "earlier\n"
        "answers otherwise than new ones (reasoning, say, left out), a conversation becomes one document an answer.");
    app.add_option("--model", model, "The model's directory, with its tokenizer.json")->required();
    app.add_option("--data", data, "One or more data files")->required();
    app.add_option("--out", out, "The token file to write (.safetensors)")->required();
    app.add_option("--chat", options.chat, "Chat layout, instead of that of the model's template: " + Chat::names());
    app.add_option("--learn", learn, "answers: what the model is to write; all: every token")
        ->check(CLI::IsMember({"answers", "all"}))
        ->capture_default_str();
    app.add_flag("--skip-bad", options.skip_bad,
                 "Leave out lines that cannot be used, instead of stopping at the first");
    app.add_option("--show", show, "Print the first documents, or pairs, with what is learned marked")
        ->check(CLI::NonNegativeNumber);
    app.callback([this] { run(); });
  }

 private:
  void run() {
    require(std::filesystem::path(out).extension() == ".safetensors", "--out ", out,
            ": a token file is a safetensors file; name it so");
    options.learn_all = learn == "all";
    model = model_directory(model);
    const auto start = std::chrono::steady_clock::now();
    write_tokens({data.begin(), data.end()}, model, options, out);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

    const TokenFile file(out);
    const Tokenizer tokenizer{std::filesystem::path(model)};
    file.require_vocabulary(file.groups() ? INT32_MAX
                                          : tokenizer.size());  // a model may sample tokens that have no text
    const Index units = file.documents() / file.together();
    for (Index i = 0; i < std::min(show, units) * file.together(); ++i) print(tokenizer, file, i);
    const auto tokens = static_cast<double>(file.token_count()), learned = static_cast<double>(file.learned_count());
    const char* unit = kDataUnits[static_cast<int>(file.kind())];
    std::printf("%s: %ld %ss, %ld tokens, %ld of them learned (%.1f%%), the longest %s %ld tokens\n", out.c_str(),
                units, unit, file.token_count(), file.learned_count(), 100 * learned / tokens, unit,
                file.longest_together());
    std::printf("%s tokens/s on %d threads\n", human_count(tokens / seconds).c_str(), omp_get_max_threads());
    const std::string skipped = file.metadata().at("skipped");
    if (skipped != "0") {
      std::printf("skipped %s of the data, the first: %s\n", skipped.c_str(),
                  file.metadata().at("first_skipped").c_str());
    }
  }

  // What is learned stands on a bright ground on a terminal, and between ⟦ ⟧ elsewhere.
  static void print(const Tokenizer& tokenizer, const TokenFile& file, Index i) {
    const bool terminal = isatty(STDOUT_FILENO);
    const auto tokens = file.tokens(i);
    const auto learn = file.learn(i);
    const std::string what = file.preferences() ? format(", %s", i % 2 ? "rejected" : "chosen")
                             : file.groups()    ? format(", advantage %.3f", file.advantage(i).scaled)
                                                : "";
    std::printf("--- %s %ld%s, %ld tokens ---\n", kDataUnits[static_cast<int>(file.kind())], i / file.together() + 1,
                what.c_str(), file.length(i));
    for (std::size_t begin = 0, end = 0; begin < tokens.size(); begin = end) {
      while (end < tokens.size() && learn[end] == learn[begin]) ++end;
      const std::string text = without_controls(tokenizer.decode(tokens.subspan(begin, end - begin)));
      const char* marks[] = {terminal ? "\033[30;42m" : "⟦", terminal ? "\033[0m" : "⟧"};
      std::printf("%s%s%s", learn[begin] ? marks[0] : "", text.c_str(), learn[begin] ? marks[1] : "");
    }
    std::printf("\n");
  }

  std::string model, out, learn = "answers";
  std::vector<std::string> data;
  DataOptions options;
  Index show = 0;
};

}  // namespace

std::unique_ptr<Command> tokenize_command(CLI::App& app) { return std::make_unique<TokenizeCommand>(app); }

}  // namespace streambp
