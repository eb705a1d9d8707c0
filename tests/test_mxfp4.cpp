// Experts in MXFP4: gpt-oss as it is published, beside the same numbers in float32.
#include "data/files/model_directory.h"
#include "tests/fine_tuning.h"

namespace streambp {
namespace {

class Mxfp4 : public FineTuning {
 protected:
  // Writes the new model twice: to `packed` with random experts in MXFP4, to `wide` with their values.
  void SetUp() override {
    FineTuning::SetUp();
    expect_ok(
        "train --family gpt_oss --experts 4 --experts-per-token 2 --layers 2 --hidden 64 --heads 2 --mlp 64 "
        "--length 256 --steps 1 --sample 0 --out new");
    fs::copy("new/step-000001", "packed");
    fs::copy("new/step-000001", "wide");
    Json config = parse_json_file("packed/config.json");
    config["quantization_config"] = {{"quant_method", "mxfp4"}};
    write_file_atomically("packed/config.json", config.dump());
    const SafetensorsFile file("new/step-000001/model.safetensors");
    SafetensorsWriter packed("packed/model.safetensors", {}), wide("wide/model.safetensors", {});
    for (const auto& [name, tensor] : file.tensors()) {
      if (!name.ends_with("_proj") || name.find("experts") == name.npos) {
        for (SafetensorsWriter* writer : {&packed, &wide})
          writer->add(name, tensor.dtype, tensor.shape, tensor.data, tensor.bytes);
        continue;
      }
      const Index experts = tensor.shape[0], inputs = tensor.shape[1], outputs = tensor.shape[2];
      auto& blocks = bytes_.emplace_back(tensor.count / 2);
      auto& scales = bytes_.emplace_back(tensor.count / 32);
      auto& values = values_.emplace_back(tensor.count);
      for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<std::uint8_t>(112 + i * 7 % 13);
      for (Index i = 0; i < tensor.count; ++i) {  // counts experts, outputs, inputs
        const Index e = i / (inputs * outputs), out = i / inputs % outputs, in = i % inputs;
        const auto code = static_cast<unsigned>(Random(3).below(16, static_cast<std::uint64_t>(i)));
        blocks[i / 2] = static_cast<std::uint8_t>(blocks[i / 2] | code << (i % 2 ? 4 : 0));
        const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        values[(e * inputs + in) * outputs + out] =
            static_cast<float>((code < 8 ? 1 : -1) * magnitudes[code % 8] * std::exp2(scales[i / 32] - 127));
      }
      packed.add(name + "_blocks", "U8", {experts, outputs, inputs / 32, 16}, blocks.data(), blocks.size());
      packed.add(name + "_scales", "U8", {experts, outputs, inputs / 32}, scales.data(), scales.size());
      wide.add(name, "F32", tensor.shape, values.data(), 4 * values.size());
    }
    packed.finish(), wide.finish();
  }
  // Writes packed/model.safetensors again with a change to one of its tensors.
  static void change(const std::string& changed, const std::function<void(std::string&, Tensor&)>& f) {
    const SafetensorsFile file("packed/model.safetensors");
    SafetensorsWriter writer("changed.safetensors", {});
    for (const auto& [name, tensor] : file.tensors()) {
      std::string bytes(reinterpret_cast<const char*>(tensor.data), tensor.bytes);
      Tensor t = tensor;
      if (name == changed) f(bytes, t);
      if (bytes.empty()) continue;
      writer.add(name, t.dtype, t.shape, [=](std::ostream& out) { out << bytes; });
    }
    writer.finish();
    fs::copy("changed.safetensors", "packed/model.safetensors", fs::copy_options::overwrite_existing);
  }
  static std::string tune(const std::string& model, const std::string& options) {
    return "train --model " + model + " --data data.jsonl --length 256 --steps 2 --eval-fraction 0 --rate 1e-2 " +
           options;
  }
  double eval(const std::string& model) {
    expect_ok("eval --data data.jsonl --length 256 --json eval.json --model " + model);
    return parse_json_file("eval.json")["total"]["loss"];
  }
  // The experts of this model are those of `packed`, byte by byte.
  static void expect_same_experts(const std::string& model) {
    const SafetensorsFile before("packed/model.safetensors"), after(model + "/model.safetensors");
    std::size_t compared = 0;
    for (const auto& [name, tensor] : before.tensors()) {
      if (!name.ends_with("_blocks") && !name.ends_with("_scales")) continue;
      const Tensor& other = after.at(name);
      EXPECT_TRUE(other.shape == tensor.shape && std::memcmp(other.data, tensor.data, tensor.bytes) == 0) << name;
      ++compared;
    }
    EXPECT_EQ(compared, 8u);
    EXPECT_PRED2(contains, read_file(model + "/config.json"), "mxfp4");
  }

  std::list<std::vector<std::uint8_t>> bytes_;
  std::list<std::vector<float>> values_;
  const std::string gate_up_ = "model.layers.0.mlp.experts.gate_up_proj";
};

TEST_F(Mxfp4, ExpertsStayAsTheyAreAndGiveTheSameBits) {
  EXPECT_EQ(eval("packed"), eval("wide"));
  const std::string generate = "generate --prompt question --length 8 --seed 1 --json ";
  expect_ok(generate + "a.json --model packed"), expect_ok(generate + "b.json --model wide");
  EXPECT_EQ(parse_json_file("a.json")["texts"], parse_json_file("b.json")["texts"]);
  for (const std::string on : {"all", "all experts router"}) {
    const std::string lora = "--lora 2 --lora-on " + on + " --out ", number = std::to_string(on.size());
    expect_ok(tune("packed", lora + "p" + number)), expect_ok(tune("wide", lora + "w" + number));
    const std::string file = number + "/step-000002/adapter_model.safetensors";
    expect_equal("p" + file, "w" + file);
    EXPECT_LT(metric("p" + number, "memory").back(), metric("w" + number, "memory").back());
    expect_ok("merge --adapter p" + number + " --out merged" + number);
  }
  expect_same_experts("merged3");
  const SafetensorsFile merged("merged18/model.safetensors");
  EXPECT_EQ(merged.at(gate_up_).dtype, "BF16");
  EXPECT_EQ(merged.at("model.norm.weight").dtype, "F32");
  EXPECT_FALSE(contains(read_file("merged18/config.json"), "mxfp4"));
  for (const char* number : {"3", "18"}) {
    for (const std::string from : {"p", "w"})
      expect_ok("merge --save-dtype f32 --adapter " + from + number + " --out whole-" + from + number);
    expect_equal("whole-p" + std::string(number) + "/model.safetensors",
                 "whole-w" + std::string(number) + "/model.safetensors");
  }
  const std::string nf4 = "--base nf4 --lora 2 --out both";
  expect_ok(tune("packed", nf4), "experts stay in MXFP4");
  expect_ok("merge --base nf4 --save-dtype f32 --adapter both --out merged");
  EXPECT_NEAR(eval("merged"), eval("packed --base nf4 --adapter both"), 1e-6);
  expect_ok(tune("packed", "--base unpacked --keep weights=far --lora 2 --out far"));
  expect_equal("far/step-000002/adapter_model.safetensors", "p3/step-000002/adapter_model.safetensors");
  expect_refused(tune("packed", "--keep weights=far --lora 2 --out refused"), "--base unpacked has them in the run's");
}

TEST_F(Mxfp4, AModelWithOtherTrainedPartsIsSavedWithItsExperts) {
  const std::string norms = "--train '.*norm.*' --out ";
  expect_ok(tune("packed", norms + "p")), expect_ok(tune("wide", norms + "w"));
  expect_same_experts("p/step-000002");
  EXPECT_EQ(eval("p/last"), eval("w/last"));
  EXPECT_NE(eval("p/last"), eval("packed"));
  expect_ok(tune("packed", "--stop-after 1 " + norms + "stopped"));
  expect_ok("train --resume --out stopped");
  expect_equal("p/step-000002/model.safetensors", "stopped/step-000002/model.safetensors");

  const std::string refused = "are trained, so they cannot be saved in MXFP4";
  expect_refused(tune("packed", "--out all"), refused);
  expect_refused(tune("packed", "--blocks 1 --out all"), refused);
  expect_ok(tune("packed", "--save-dtype f32 --out p-all")), expect_ok(tune("wide", "--out w-all"));
  EXPECT_EQ(eval("p-all/last"), eval("w-all/last"));
  expect_ok(tune("packed", "--train '.*proj_bias' --out biases"));
  expect_same_experts("biases/step-000002");
  expect_ok(tune("packed", "--save-dtype f32 " + norms + "plain"));
  EXPECT_EQ(eval("plain/last"), eval("w/last"));
}

TEST_F(Mxfp4, DamagedFilesAreRefused) {
  const std::string evaluation = "eval --data data.jsonl --length 256 --model packed";
  const auto refuses = [&](const std::string& tensor, const auto& f, const std::string& why) {
    const std::string before = read_file("packed/model.safetensors");
    change(tensor, f);
    expect_failed(evaluation, why);
    write_file_atomically("packed/model.safetensors", before);
  };
  const std::string scales = gate_up_ + "_scales";
  refuses(
      scales, [](std::string& bytes, Tensor&) { bytes[5] = '\xff'; }, "there is a NaN among its scales");
  refuses(
      scales, [](std::string& bytes, Tensor&) { bytes[5] = '\xfd'; }, "there is a NaN among its scales");
  refuses(
      scales, [](std::string& bytes, Tensor&) { bytes.clear(); }, "has no scales \"" + scales + "\"");
  refuses(
      gate_up_ + "_blocks", [](std::string& bytes, Tensor&) { bytes.clear(); }, "has no blocks beside it");
  refuses(
      scales, [](std::string&, Tensor& t) { std::swap(t.shape[0], t.shape[1]); }, "expected 16 bytes for each scale");
  fs::copy("wide/model.safetensors", "packed/model.safetensors", fs::copy_options::overwrite_existing);
  expect_failed(evaluation, "config.json says that experts are in MXFP4");
}

}  // namespace
}  // namespace streambp
