// Shared by the tests of fine-tuning: a small model directory, and questions with answers.
#pragma once

#include "tests/commands.h"

namespace streambp {

class FineTuning : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    // A byte-level model with tokenizer files, in bfloat16 and float32.
    expect_ok("train --steps 2 --hidden 32 --layers 2 --length 64 --batch 1 --sample 0 --eval-fraction 0 --out base");
    fs::rename("base/step-000002", "model");
    change_config("max_position_embeddings", 4096);
    std::string lines;
    for (int i = 0; i < 40; ++i) {
      const std::string completion = std::string(static_cast<std::size_t>(i * 7 % 90), 'a') + " answer";
      lines += Json{{"prompt", "question " + std::to_string(i)}, {"completion", completion}}.dump() + "\n";
    }
    write_file_atomically("data.jsonl", lines);
  }
  static std::string train(const std::string& arguments) {
    return "train --model model --data data.jsonl --length 256 --chunk 256 " + arguments;
  }
  static void change_config(const char* field, const Json& value) {
    Json config = parse_json_file("model/config.json");
    config[field] = value;
    write_file_atomically("model/config.json", config.dump());
  }
  // The cached log-probs of reference models.
  static std::vector<fs::path> references() {
    std::vector<fs::path> found;
    for (const auto& entry : fs::recursive_directory_iterator("."))
      if (entry.path().filename().string().starts_with("reference-")) found.push_back(entry.path());
    return found;
  }
  static void expect_equal(const std::string& a, const std::string& b) {
    EXPECT_TRUE(read_file(a) == read_file(b)) << a << " and " << b << " differ";
  }
};

}  // namespace streambp
