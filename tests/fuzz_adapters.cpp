// Fuzz tests of adapters and quantised weights: the files of PEFT and of bitsandbytes.
#include "data/files/adapters.h"
#include "tests/fuzz_fixture.h"
#include "tests/golden.h"

namespace streambp {
namespace {

TEST_F(Fuzz, Adapters) {
  std::vector<Files> seeds;
  for (const char* name : {"llama_patterns", "gemma3_and_norms"}) {
    const fs::path from = golden_folder().parent_path() / "golden_adapters" / name;
    Files files;
    for (const char* file : {"adapter_config.json", "adapter_model.safetensors"}) files[file] = read_file(from / file);
    seeds.push_back(files);
  }
  const Config llama = Golden("llama_bias").config, gemma = Golden("gemma3").config;
  fuzz(seeds, [&](const Files& files) {
    const AdapterDirectory directory((*folder)(files));
    Config c = directory.base() == "gemma3" ? gemma : llama;
    directory.add_to(c);
    Cpu dev(std::size_t{1} << 22);
    Model<float> model{c, Tensors<float>(c)};
    allocate_weights(dev, model);
    directory.load(dev, model);
    ensure(trained_count(c) > 0, "something is trained");
  });
}

TEST_F(Fuzz, QuantisedWeights) {
  const SafetensorsFile golden(golden_folder() / "quantised/nf4.safetensors");
  const Parameter p{.name = "float32", .rows = 5, .cols = 26, .init = Init::normal};
  SafetensorsWriter writer(dir / "seed.safetensors", {});
  for (const auto& [name, tensor] : golden.tensors()) {
    if (name == p.name || name.starts_with(p.name + "."))
      writer.add(name, tensor.dtype, tensor.shape, tensor.data, tensor.bytes);
  }
  writer.finish();
  fuzz({{{"weights.safetensors", read_file(dir / "seed.safetensors")}}}, [&](const Files& files) {
    const SafetensorsFile file((*folder)(files) / "weights.safetensors");
    std::vector<float> weights(130);
    Matrix<float> matrix(weights.data(), 1, 130);
    dequantise(four_bits_of(file, Table<float>{{p, &matrix}}).front(), matrix);
    ensure(std::ranges::all_of(weights, [](float x) { return std::isfinite(x); }), "weights are finite");
  });
}

}  // namespace
}  // namespace streambp
