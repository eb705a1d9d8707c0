// The core of streambp in one page: trains a small language model on the bytes of a text with StreamBP, then writes on.
//
//   g++ -std=c++20 -O3 -march=x86-64-v3 -ffp-contract=off -fopenmp -DSTREAMBP_INSTRUCTIONS=avx2 -I. docs/minimal.cpp
//       kernels/base/{gemm,inner_loops,products,few_rows,softmax_rows}.cpp -o minimal && ./minimal README.md
#include <cstdio>
#include <fstream>
#include <sstream>

#include "generation/generate.h"
#include "training/trainer.h"

using namespace streambp;

int main(int argc, char** argv) {
  // The bytes of a text are its tokens.
  const char* file = argc > 1 ? argv[1] : "README.md";
  std::ostringstream bytes;
  bytes << std::ifstream(file, std::ios::binary).rdbuf();
  const std::string characters = bytes.str();
  const std::vector<unsigned char> text(characters.begin(), characters.end());
  constexpr Index length = 1024, steps = 200;
  if (text.size() <= length) return std::fprintf(stderr, "minimal: %s has too few bytes\n", file), 2;

  // A model with random weights, its gradient and optimizer, in one block of memory.
  const Config config = make_config("qwen3", {.vocab = 256,
                                              .hidden = 128,
                                              .layers = 4,
                                              .heads = 4,
                                              .kv_heads = 2,
                                              .head_dim = 32,
                                              .mlp = 352,
                                              .max_length = 0,
                                              .tied = true});
  Cpu cpu(std::size_t{256} << 20);
  Trainer<Cpu, float> trainer(cpu, config, length, {OptimizerKind::adamw});
  trainer.initialise(1);

  // Chunks of 256 rows: Schedule::full(length) is full-memory backpropagation, and gives the same bits.
  const Schedule schedule = Schedule::stream(256, 256);
  const OptimizerSettings adamw = {.rate = 1e-3, .warmup = 10, .steps = steps};
  for (Index step = 1; step <= steps; ++step) {
    const auto begin = Random(1).below(text.size() - length, static_cast<std::uint64_t>(step));
    Batch batch;
    batch.append(Tokens(text.begin() + static_cast<std::ptrdiff_t>(begin),
                        text.begin() + static_cast<std::ptrdiff_t>(begin) + length));
    const StepResult result = trainer.step({batch}, schedule, adamw, step);  // gradient, then update
    if (step % 20 == 0) std::printf("step %3ld  loss %.4f\n", step, result.measures.loss), std::fflush(stdout);
  }

  // A sample that continues the text's first bytes.
  Generator<Cpu, float> generator(cpu, trainer.model, {.slots = 1, .room = 512});
  const GenerationSettings settings = {.sampling = {.temperature = 0.5}, .length = 300};
  generate(generator, {Tokens(text.begin(), text.begin() + 64)}, settings,
           [](std::size_t, const Continuation& sample) { std::putchar(sample.tokens.back()); });
  std::puts("");
}
