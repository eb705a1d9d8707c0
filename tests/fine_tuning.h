// Shared by the tests of fine-tuning: a small model directory, and questions with answers.
#pragma once

#include "tests/commands.h"

namespace streambp {

class FineTuning : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    // A byte-level model with tokenizer files, in bfloat16 and float32.
    expect_ok("train --steps 2 --hidden 32 --layers 2 --length 64 --batch 1 --sample 0 --eval-fraction 0 --out " +
              path("base"));
    model = path("base/step-000002");
    std::string lines;
    for (int i = 0; i < 40; ++i) {
      lines += Json{{"prompt", "question " + std::to_string(i)},
                    {"completion", std::string(static_cast<std::size_t>(i * 7 % 90), 'a') + " answer"}}
                   .dump() +
               "\n";
    }
    write_file_atomically(path("data.jsonl"), lines);
  }
  std::string train(const std::string& arguments) const {
    return "train --model " + model + " --data " + path("data.jsonl") + " --length 256 --chunk 256 " + arguments;
  }
  void expect_equal(const std::string& a, const std::string& b) {
    EXPECT_TRUE(read_file(path(a)) == read_file(path(b))) << a << " and " << b << " differ";
  }

  std::string model;
};

}  // namespace streambp
