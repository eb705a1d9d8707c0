// Your own loss on a model in Hugging Face's layout: its exact gradient, and a step of AdamW. Any differentiable function
// of the log-probs of the tokens is a loss.
//   your-own-loss MODEL "a text"
//
// docs/library.md shows how to build it against an installed streambp.
#include <cmath>
#include <cstdio>

#include "data/files/model_directory.h"
#include "data/files/tokenizer_file.h"
#include "training/engine.h"
#include "training/plan.h"

using namespace streambp;

// Minus the weighted sum of the log-probs: later tokens count more.
double own_loss(const Batch& batch, const std::vector<double>& logps, std::vector<double>& weights) {
  double loss = 0;
  const auto n = static_cast<double>(logps.size());
  for (std::size_t t = 0; t < logps.size(); ++t) {
    if (batch.targets[t] < 0) continue;                  // the last token has nothing to predict
    weights[t] = -static_cast<double>(t + 1) / (n * n);  // d loss / d logp
    loss += weights[t] * logps[t];
  }
  return loss;
}

int main(int argc, char** argv) try {
  require(argc == 3, "usage: your-own-loss MODEL TEXT");
  const std::filesystem::path model = argv[1];

  Batch batch;  // documents end to end; here only one
  batch.append(read_tokenizer(model).encode(argv[2]));
  require(batch.target_count() > 0, "the text needs at least two tokens");

  StepSettings settings;
  settings.config = read_config(model);
  settings.optimizer = OptimizerKind::adamw;
  settings.objective.kind = ObjectiveKind::own;
  settings.objective.loss = own_loss;
  const Index rows = layout_of(settings.config).rows(batch);  // of the stream that the batch takes
  const Schedule schedule = schedule_for(Mode::stream, settings, rows, 512);

  // The planner runs the step without computing, so the engine allocates exactly what it needs.
  const auto engine = make_engine(settings, rows, plan(settings, rows, schedule).capacity());
  engine->load(model);

  const double loss = engine->accumulate({batch}, schedule).loss;
  double squares = 0;
  for (const std::vector<double>& tensor : engine->gradient())
    for (const double x : tensor) squares += x * x;
  engine->release_gradient();
  std::printf("loss %.6f, norm of its gradient %.6f\n", loss, std::sqrt(squares));

  OptimizerSettings adamw;
  adamw.rate = 1e-4, adamw.warmup = 0, adamw.steps = 10;
  for (Index step = 1; step <= adamw.steps; ++step) {
    const StepResult result = engine->step({batch}, schedule, adamw, step);
    std::printf("step %2ld: loss %.6f\n", step, result.measures.loss);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "your-own-loss: %s\n", error.what());
  return 2;
}
