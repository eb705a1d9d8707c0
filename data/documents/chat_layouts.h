// Chat layouts as data: how published models render a conversation, and the hashes of the templates that do so.
//
//   begin  [system message]
//   {user.before} content {user.after}
//   {assistant.before} | lead content end | {assistant.after}  ...
//
// A prompt ends with {assistant.before}. The model generates the part between the bars, and the loss covers only that
// part. {bos} and {eos} stand for the model's tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace streambp {

// The text around a message.
struct Frame {
  std::string before, after;
  bool trim = false;  // remove white space around the content
};

// Where a system message at the start is placed.
enum class SystemPlace { own_turn, first_user_turn, last_user_turn, refused };
// Answers to the last question begin with <think> ... </think>. Earlier answers lose it.
enum class Reasoning { none, begun_by_model, begun_by_prompt };

struct Layout {
  std::string name;
  std::string begin = "";
  Frame user, assistant;
  std::string lead = "", end;  // text that the model generates before and after its answer
  Frame system = {};           // the first message; in a user turn, `after` separates it from the user's text
  Frame later_system = {};     // a system message between turns; empty: not allowed
  std::optional<std::string> default_system = {};
  SystemPlace system_place = SystemPlace::own_turn;
  bool alternates = false;  // user and assistant must alternate
  Reasoning reasoning = Reasoning::none;
  std::vector<std::string> tokens;  // that the layout writes: single tokens, in tokenizers that have them
};

// <|im_start|>role ... <|im_end|>
inline Layout chatml(const std::string& name, std::optional<std::string> default_system = {},
                     Reasoning reasoning = Reasoning::none) {
  const Frame system = {"<|im_start|>system\n", "<|im_end|>\n"};
  std::vector<std::string> tokens = {"<|im_start|>", "<|im_end|>"};
  if (reasoning != Reasoning::none) tokens.insert(tokens.end(), {"<think>", "</think>"});
  return {.name = name,
          .user = {"<|im_start|>user\n", "<|im_end|>\n"},
          .assistant = {"<|im_start|>assistant\n", "\n"},
          .end = "<|im_end|>",
          .system = system,
          .later_system = system,
          .default_system = std::move(default_system),
          .reasoning = reasoning,
          .tokens = std::move(tokens)};
}

// Llama 3: a header with the role. From Llama 3.1 on there is always a system message, which begins with dates. "Today"
// is the templates' fixed fallback, so that the same data gives the same tokens every day.
enum class SystemDates { none, fixed };
inline Layout llama3(const std::string& name, SystemDates system_dates) {
  const bool dates = system_dates == SystemDates::fixed;
  const auto header = [](const std::string& role) { return "<|start_header_id|>" + role + "<|end_header_id|>\n\n"; };
  const std::string end = "<|eot_id|>", today = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n";
  return {.name = name,
          .begin = "{bos}",
          .user = {header("user"), end, true},
          .assistant = {header("assistant"), "", true},
          .end = end,
          .system = {header("system") + (dates ? today : ""), end, true},
          .later_system = {header("system"), end, true},
          .default_system = dates ? std::optional<std::string>("") : std::nullopt,
          .tokens = {"{bos}", "<|start_header_id|>", "<|end_header_id|>", end}};
}

inline Layout gemma(const std::string& name, SystemPlace place) {
  return {.name = name,
          .begin = "{bos}",
          .user = {"<start_of_turn>user\n", "<end_of_turn>\n", true},
          .assistant = {"<start_of_turn>model\n", "\n", true},
          .end = "<end_of_turn>",
          .system = {"", "\n\n"},
          .system_place = place,
          .alternates = true,
          .tokens = {"{bos}", "<start_of_turn>", "<end_of_turn>"}};
}

// Mistral's [INST]. Spaces differ between versions.
inline Layout mistral(const std::string& name, const Frame& user, const std::string& lead, SystemPlace place) {
  return {.name = name,
          .begin = "{bos}",
          .user = user,
          .assistant = {"", ""},
          .lead = lead,
          .end = "{eos}",
          .system = {"", "\n\n"},
          .system_place = place,
          .alternates = true,
          .tokens = {"{bos}", "{eos}", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}};
}

inline Layout mistral_v3() {
  Layout layout = mistral("mistral-v3", {"[INST] ", "[/INST]"}, " ", SystemPlace::last_user_turn);
  layout.assistant.trim = true;
  return layout;
}

inline Layout mistral_v7() {
  Layout layout = mistral("mistral-v7", {"[INST] ", "[/INST]"}, " ", SystemPlace::own_turn);
  layout.system = layout.later_system = {"[SYSTEM_PROMPT] ", "[/SYSTEM_PROMPT]"};
  layout.alternates = false;
  return layout;
}

inline Layout zephyr() {
  return {.name = "zephyr",
          .user = {"<|user|>\n", "{eos}\n"},
          .assistant = {"<|assistant|>\n", "\n"},
          .end = "{eos}",
          .system = {"<|system|>\n", "{eos}\n"},
          .later_system = {"<|system|>\n", "{eos}\n"},
          .tokens = {"{eos}", "<|user|>", "<|assistant|>", "<|system|>"}};
}

inline const std::vector<Layout>& chat_layouts() {
  using enum SystemPlace;
  static const std::vector<Layout> layouts = {
      chatml("chatml"),
      chatml("qwen1.5", "You are a helpful assistant"),
      chatml("qwen2", "You are a helpful assistant."),
      chatml("qwen2.5", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
      chatml("qwen2.5-math", "Please reason step by step, and put your final answer within \\boxed{}."),
      chatml("qwen3", {}, Reasoning::begun_by_model),
      chatml("qwen3-thinking-2507", {}, Reasoning::begun_by_prompt),
      chatml("smollm2", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
      llama3("llama3", SystemDates::none),
      llama3("llama3.1", SystemDates::fixed),
      mistral("mistral-v1", {"[INST] ", " [/INST]"}, "", refused),
      mistral("mistral-v1-system", {" [INST] ", " [/INST]"}, " ", first_user_turn),
      mistral_v3(),
      mistral("mistral-v3-tekken", {"[INST]", "[/INST]"}, "", last_user_turn),
      mistral_v7(),
      gemma("gemma2", refused),
      gemma("gemma3", first_user_turn),
      zephyr(),
  };
  return layouts;
}

// Published templates of each layout, by the hash of their text without trailing white space. scripts/make_chat_golden.py
// computes the hashes, and checks that all templates of a layout render alike.
struct KnownTemplates {
  const char* layout;
  std::vector<std::uint64_t> hashes;
};
inline const std::vector<KnownTemplates> kKnownTemplates = {
    {"chatml",
     {0x17fde6ecda9c7c01u, 0x773d13e188afc917u, 0xa41d6bae9b9141bcu, 0x88bf4138d5c826f0u, 0x3751fe8ea48448abu}},
    {"qwen1.5", {0xaf82eb57e8662e59u, 0xc867da37c989d41fu}},
    {"qwen2", {0x75e88977b2787cd7u, 0x16bc91fc7006a16du, 0x8a87094e0e1e24c5u}},
    {"qwen2.5", {0xe642ce246d7f2e3du}},
    {"qwen2.5-math", {0xfbed2ee177a43d8du}},
    {"qwen3", {0x2bfdb7aa9754484eu, 0x959a4551391a6549u, 0x9cdcd79e2ef275aau}},
    {"qwen3-thinking-2507", {0xcd0d41a64dfce181u, 0x3da2a7a654434111u}},
    {"smollm2", {0x09b5156a5cf6abfcu, 0x45ec583d4d25bc3au}},
    {"llama3", {0x32844fd43eab01d2u, 0x0e60067a5537498eu}},
    {"llama3.1", {0x368f4c34b8554414u, 0xcc0368e1ffb6b958u}},
    {"mistral-v1", {0x8c734b90b4f8d84du}},
    {"mistral-v1-system", {0x46eac0bf5c765c47u}},
    {"mistral-v3", {0x2487e6e79d6345cfu}},
    {"mistral-v3-tekken", {0x20783e9d94168233u}},
    {"mistral-v7", {0xe4a9cc594604808au}},
    {"gemma2", {0x5c10ee65212d93b3u}},
    {"gemma3", {0xd19b6ff3a49deea5u, 0xa0156608461ac2dbu}},
    {"zephyr", {0xcd8b49000db02c2cu, 0x0af6ea9cf9896e56u}},
};

}  // namespace streambp
