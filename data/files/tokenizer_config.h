// Reads DIR/tokenizer_config.json and related files: the tokens that begin and end a sequence, and the chat template.
#pragma once

#include <filesystem>

#include "data/files/gguf_model.h"

namespace streambp {

// A small JSON file of a model directory; null if there is no such file.
inline Json read_model_json(const fs::path& path) {
  if (!has_file(path)) return nullptr;
  Json json = parse_json(read_small_file(path), path.string());
  require(json.is_object(), path.string(), ": is not a JSON object; is the file complete?");
  return json;
}

// The text of the model's tokens with a role, "" if it has none.
struct TextTokens {
  std::string bos, eos, unk = "", pad = "";
};

inline TextTokens read_text_tokens(const fs::path& model) {
  TextTokens tokens;
  for (const char* name : {"special_tokens_map.json", "tokenizer_config.json"}) {  // the second takes precedence
    const Json json = read_model_json(model / name);
    const auto take = [&](const char* key, std::string& token) {
      if (!json.is_object() || !json.contains(key)) return;
      const Json& value = json[key];
      const Json& text = value.is_object() && value.contains("content") ? value["content"] : value;
      if (text.is_string()) token = text.get<std::string>();
    };
    take("bos_token", tokens.bos);
    take("eos_token", tokens.eos);
    take("unk_token", tokens.unk);
    take("pad_token", tokens.pad);
  }
  return tokens;
}

// A model's chat template and the file that holds it. Without a template, the text is empty.
struct Template {
  std::string text, file;
};

// In a list of named templates, the one named "default" is used.
inline std::string default_template(const Json& list, const std::string& file) {
  for (const Json& entry : list) {
    const auto is_text = [&](const char* key) {
      return entry.is_object() && entry.contains(key) && entry[key].is_string();
    };
    if (is_text("name") && is_text("template") && entry["name"] == "default") return entry["template"];
  }
  fail(file, ": no chat template is named \"default\"; choose a template with --chat");
}

inline Template read_template(const fs::path& model) {
  const fs::path jinja = model / "chat_template.jinja";
  if (has_file(jinja)) return {read_file(jinja), jinja.string()};
  for (const char* name : {"chat_template.json", "tokenizer_config.json"}) {
    const Json json = read_model_json(model / name);
    if (!json.is_object() || !json.contains("chat_template") || json["chat_template"].is_null()) continue;
    const std::string file = (model / name).string();
    const Json& value = json["chat_template"];
    if (value.is_string()) return {value.get<std::string>(), file};
    require(value.is_array(), file, ": \"chat_template\" must be a string or a list of named templates");
    return {default_template(value, file), file};
  }
  return {};
}

}  // namespace streambp
