// Fuzz tests of GGUF files: everything in them is read.
#include "data/files/model_directory.h"
#include "tests/fuzz_fixture.h"
#include "tests/golden.h"

namespace streambp {
namespace {

TEST_F(Fuzz, GgufFiles) {
  std::vector<Files> seeds;
  for (const char* name : {"llama3", "lfm2", "qwen3_5"})
    seeds.push_back({{"model.gguf", read_file(golden_folder() / "gguf" / (std::string(name) + ".gguf"))}});
  fuzz(seeds, [&](const Files& files) {
    const GgufModel model((*folder)(files) / "model.gguf");
    for (const auto& [name, tensor] : model.tensors) {
      std::vector<float> row(static_cast<std::size_t>(std::min<Index>(tensor.count, 1000)));
      read(tensor, tensor.count - std::ssize(row), std::ssize(row), row.data());
    }
    ensure(model.tensors.size() ==
               by_stored_tensor(table(model.config, *std::make_unique<Tensors<float>>(model.config))).size(),
           "every tensor of the model is there");
  });
}

}  // namespace
}  // namespace streambp
