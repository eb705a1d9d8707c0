// streambp verify --batch --against: judging another trainer's gradient.
#include <list>
#include <numeric>

#include "tests/byte_model.h"
#include "tests/commands.h"
#include "tests/recorded.h"

namespace streambp {
namespace {

class RefereeCommands : public Commands {
 protected:
  void SetUp() override {
    Commands::SetUp();
    save_random_model("model", make_config("llama", {40, 16, 2, 2, 1, 8, 24, 0, false}));
    write_step("step.safetensors", 30);
  }

  // Two micro-batches of a row with two documents.
  void write_step(const std::string& path, Index vocabulary) const {
    TensorFile file(path);
    for (int batch = 0; batch < 2; ++batch) {
      const std::string prefix = std::to_string(batch) + ".";
      std::vector<std::int64_t> ids, positions;
      for (Index i = 0; i < 24 + 30 * batch; ++i) {
        ids.push_back((7 * i * i + 3 * i + batch) % vocabulary);
        positions.push_back(i < 10 ? i : i - 10);
      }
      file.add(prefix + "input_ids", ids).add(prefix + "labels", ids).add(prefix + "position_ids", positions);
    }
    file.write();
  }
};

const std::string kJudge = "verify --model model --batch step.safetensors ";

TEST_F(RefereeCommands, JudgeARightAndAWrongGradient) {
  expect_ok(kJudge + "--save-gradient right.safetensors", "2 micro-batches in 1 file: 78 tokens in 4 documents");
  expect_ok(kJudge + "--against right.safetensors --json right.json", "Right: rounding in float32 explains every");
  EXPECT_EQ(parse_json_file("right.json")["verdict"], "right");
  for (const std::string defect : {"micro-batch-means", "documents-joined", "rope-pairs"}) {
    const std::string file = defect + ".safetensors";
    expect_ok(kJudge + "--save-gradient " + file + " --defect " + defect, "the whole gradient");
    expect_outcome(1, execute(kJudge + "--json wrong.json --against " + file), "WRONG, first in lm_head.weight",
                   "(" + defect + ")");
    const Json json = parse_json_file("wrong.json");
    EXPECT_EQ(json["explanations"][0]["defects"], Json({defect}));
    EXPECT_EQ(json["first"], "lm_head.weight");
    EXPECT_EQ(json["tensors"].size(), 21u);
  }
}

TEST_F(RefereeCommands, VerifyWritesAStepForOtherTrainers) {
  for (const std::string dtype : {"f32", "f64", "bf16"}) {
    expect_ok(
        "verify --model model --length 300 --save-batch b.safetensors --save-gradient g.safetensors --dtype " + dtype,
        "Verified");
    expect_ok("verify --model model --batch b.safetensors --against g.safetensors",
              "300 tokens in 3 documents (documents from document_ids)",
              dtype == "bf16" ? "Right: rounding in bfloat16" : "Right: rounding in float32");
  }
  expect_refused("verify --save-batch x.safetensors --save-gradient x.safetensors",
                 "another option names the same file");
  expect_refused("verify --save-batch x.json", "name it .safetensors");
}

// Published GPT-2s have names with and without "transformer.". The gradient has those of the model's files.
TEST_F(RefereeCommands, WriteAGradientWithTheNamesOfTheModel) {
  save_random_model("gpt2.files", make_config("gpt2", {40, 16, 1, 2, 2, 8, 24, 60, true}));
  const SafetensorsFile plain("gpt2.files/model.safetensors");
  SafetensorsWriter writer("renamed.safetensors", {});
  for (const auto& [name, tensor] : plain.tensors())
    writer.add("transformer." + name, tensor.dtype.c_str(), tensor.shape, tensor.data, tensor.bytes);
  writer.finish();
  fs::rename("renamed.safetensors", "gpt2.files/model.safetensors");
  expect_ok("verify --model gpt2.files --batch step.safetensors --save-gradient g.safetensors");
  EXPECT_TRUE(SafetensorsFile("g.safetensors").find("transformer.h.0.attn.c_attn.weight"));
  expect_ok("verify --model gpt2.files --batch step.safetensors --against g.safetensors", "Right: rounding in float32");
}

// 64 micro-batches, added in bfloat16: a factor of 0.9 could be rounding, but nobody should rely on it.
TEST_F(RefereeCommands, SayThatAStepCannotDecide) {
  save_random_model("tiny", make_config("qwen2", {13, 8, 1, 1, 1, 8, 8, 0, false}));
  TensorFile step("many.safetensors");
  for (int i = 0; i < 64; ++i)
    for (const char* name : {"input_ids", "labels"}) step.add<std::int64_t>(std::to_string(i) + "." + name, {3, 1, 4});
  step.write();
  const std::string judge = "verify --model tiny --batch many.safetensors ";
  expect_ok(judge + "--save-gradient g.safetensors");
  for (const bool known : {false, true}) {
    const SafetensorsFile right("g.safetensors");
    SafetensorsWriter writer("scaled.safetensors", {{"summed_in", known ? "float32" : "bfloat16"}});
    std::vector<std::vector<double>> all;
    std::uint64_t i = 0;
    for (const auto& [name, tensor] : right.tensors()) {
      std::vector<double>& values = all.emplace_back(numbers<double>(tensor));
      for (double& x : values) x *= 0.9 + 0.002 * Random(1).normal(++i);
      writer.add(name, "F64", tensor.shape, values.data(), 8 * values.size());
    }
    writer.finish();
    const std::string command = judge + "--against scaled.safetensors --minutes 0.001 --json verdict.json";
    if (known) expect_outcome(1, execute(command), "WRONG");
    if (!known) expect_outcome(3, execute(command), "This step cannot decide", "one of at most 6 micro-batches");
    EXPECT_EQ(parse_json_file("verdict.json")["verdict"] == "undecided", !known);
  }
}

TEST_F(RefereeCommands, ShowWhatADefectDoesToASmallModel) {
  expect_ok("verify --defect shifted-twice --hidden 32 --layers 2 --json effect.json", "layer 1", "the whole gradient");
  EXPECT_EQ(parse_json_file("effect.json")["effect"].size(), 6u);
  expect_refused("verify --defect window-short", "cannot have it");
  expect_refused("verify --defect typo", "micro-batch-means");
}

// The gradient in one file, with changed numbers or other names, in another one.
template <class F>
void rewrite_gradient(const std::string& from, const std::string& to, F&& change) {
  const SafetensorsFile right(from);
  SafetensorsWriter writer(to, {});
  std::list<std::vector<double>> all;
  for (const auto& [name, tensor] : right.tensors())
    change(writer, name, tensor.shape, all.emplace_back(numbers<double>(tensor)));
  writer.finish();
}
void add_numbers(SafetensorsWriter& to, const std::string& name, const std::vector<Index>& shape, const double* first) {
  const Index count = std::accumulate(shape.begin(), shape.end(), Index{1}, std::multiplies<>());
  to.add(name, "F64", shape, first, 8 * static_cast<std::size_t>(count));
}

// In older versions of transformers, there is a tensor for each expert.
TEST_F(RefereeCommands, NameTheExpertsThatDoNotMove) {
  Config c = make_config("qwen3_moe", {40, 16, 2, 2, 1, 8, 24, 0, false});
  c.experts = 4;
  save_random_model("moe", c);
  const std::string judge = "verify --model moe --batch step.safetensors ";
  expect_ok(judge + "--save-gradient right.safetensors");
  rewrite_gradient("right.safetensors", "apart.safetensors",
                   [](SafetensorsWriter& to, auto name, auto shape, auto& dw) {
                     const std::size_t at = name.find(".experts.") + 9;
                     if (shape.size() < 3) return add_numbers(to, name, shape, dw.data());
                     const bool two = name.ends_with("gate_up_proj"), still = name.starts_with("model.layers.1.");
                     const std::size_t size = dw.size() / (two ? 8 : 4);
                     for (std::size_t i = 0; i < dw.size() / size; ++i) {
                       const std::size_t e = two ? i / 2 : i;
                       double* first = dw.data() + i * size;
                       if (still && e == 3) std::fill_n(first, size, 0);
                       const std::string part = two ? i % 2 == 0 ? ".gate_proj" : ".up_proj" : ".down_proj";
                       add_numbers(to, name.substr(0, at) + std::to_string(e) + part + ".weight",
                                   {static_cast<Index>(size) / shape[2], shape[2]}, first);
                     }
                   });
  expect_outcome(1, execute(judge + "--against apart.safetensors"),
                 "all other tensors are right, and expert 3 of layer 1 has no gradient "
                 "(model.layers.1.mlp.experts.down_proj, model.layers.1.mlp.experts.gate_up_proj)");
}

// PEFT's names of experts' adapters.
TEST_F(RefereeCommands, NameAdaptersOfExpertsThatDoNotMove) {
  Config c = make_config("qwen3_moe", {40, 16, 2, 2, 1, 8, 24, 0, false});
  c.experts = 4;
  save_random_model("moe", c);
  const std::string judge = "verify --model moe --lora 2 --lora-on attention experts --batch step.safetensors ";
  expect_ok(judge + "--save-gradient right.safetensors");
  for (const std::string still : {"no", "lora_", "experts.lora_"}) {
    rewrite_gradient("right.safetensors", "peft.safetensors",
                     [&](SafetensorsWriter& to, auto name, auto shape, auto& dw) {
                       for (const auto& [module, inner] :
                            {std::pair<std::string, std::string>{".gate_up_proj", ".base_layer"}, {".down_proj", ""}})
                         if (const auto at = name.find(".experts" + module); at != name.npos)
                           name.replace(at + 8, module.size(), inner);
                       if (name.find(".experts.") != name.npos && name.find(still) != name.npos)
                         std::ranges::fill(dw, 0);
                       add_numbers(to, name, shape, dw.data());
                     });
    const Outcome outcome = execute(judge + "--against peft.safetensors");
    if (still == "no")
      expect_outcome(0, outcome, "Right: rounding in float32");
    else
      expect_outcome(1, outcome,
                     still == "lora_" ? "8 of the 8 tensors of experts' adapters have no gradient: no expert moves."
                                      : "4 of the 8 tensors of experts' adapters have no gradient: they do not move.",
                     "all other tensors are right");
  }
}

TEST_F(RefereeCommands, AcceptAPartOfTheParametersInNarrowTypes) {
  expect_ok(kJudge + "--save-gradient whole.safetensors");
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  const std::vector<double> values = numbers<double>(SafetensorsFile("whole.safetensors").at(name));
  std::vector<BFloat16> narrow;
  for (const double x : values) narrow.push_back(BFloat16(static_cast<float>(x)));
  SafetensorsWriter writer("part.safetensors", {});
  writer.add("module._orig_mod." + name, "BF16", {24, 16}, narrow.data(), 2 * narrow.size());
  writer.finish();
  expect_ok(kJudge + "--against part.safetensors", "20 tensors without a recorded gradient",
            "Right: rounding in bfloat16");
  expect_outcome(1, execute(kJudge + "--against part.safetensors --computed-in f32 --minutes 0.001"), "WRONG");
}

TEST_F(RefereeCommands, WrongOptionsAndFilesAreRefused) {
  expect_ok(kJudge + "--save-gradient right.safetensors");
  expect_refused("verify --model model --against right.safetensors", "--against needs --batch");
  expect_refused("verify --batch step.safetensors", "--model DIR");
  expect_refused(kJudge + "--against nowhere.safetensors", "nowhere.safetensors");
  expect_refused(kJudge + "--against step.safetensors", "none of its 6 tensors");
  expect_refused(kJudge + "--against right.safetensors right.safetensors", "the second tensor of");
  expect_refused(kJudge + "--against right.safetensors --defect rope-pairs", "cannot be combined");
  expect_refused(kJudge + "--dtype bf16", "not exact enough");
  expect_refused(kJudge + "--data x", "--data does not go with --batch or --defect");
  expect_refused(kJudge + "--computed-in f16", "bf16");
  expect_refused(kJudge + "--mean documents", "--mean does not go with --batch");
  expect_refused("verify --computed-in f32", "--computed-in is for --against");
  expect_refused("verify --mean documents --save-batch x.safetensors", "leave out --objective and --mean");
  const std::string bytes = read_file("right.safetensors");
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, bytes.size() / 2, bytes.size() - 1}) {
    write_file_atomically("cut.safetensors", bytes.substr(0, size));
    expect_refused(kJudge + "--against cut.safetensors", "cut.safetensors");
  }
  TensorFile("nan.safetensors").add("model.norm.weight", std::vector<double>(16, NAN)).write();
  expect_refused(kJudge + "--against nan.safetensors", "element 0 is nan");
  TensorFile("shape.safetensors").add("model.norm.weight", std::vector<double>(17, 1)).write();
  expect_refused(kJudge + "--against shape.safetensors", "has shape [17], but model.norm.weight has [16]");
  write_step("step.safetensors", 50);
  expect_refused(kJudge + "--against right.safetensors", "outside the model's vocabulary of 40");
}

TEST_F(RefereeCommands, CertifyAModel) {
  const std::string certify = "verify --model model --certificate ";
  const std::string table =
      expect_ok(certify + "--json c.json", "modes         gradient in full", "same bits", "--certificate NAME");
  const Json json = parse_json_file("c.json");
  EXPECT_EQ(json["holds"], true);
  ASSERT_EQ(json["certificate"].size(), 10u);
  for (const Json& line : json["certificate"])
    EXPECT_TRUE(line["holds"] == true || line["holds"].is_null()) << line.dump();
  EXPECT_EQ(json["certificate"][9]["result"], "not run: no --adapter is given");
  expect_ok("verify --model model --certificate modes", json["certificate"][0]["result"].get<std::string>());
  EXPECT_PRED2(contains, json["certificate"][0]["command"].get<std::string>(),
               "verify --model model --certificate modes");
  expect_refused(certify + "everything", "\"everything\" is not one of quick, full, modes");
  for (const std::string other : {"--oracle", "--save-gradient g.safetensors", "--lanes 2", "--batch step.safetensors"})
    expect_refused(certify + other, "leave it out");
}

}  // namespace
}  // namespace streambp
