// The timeline of `plan`: its maximum is the planned peak, and its page is checked before the work.
#include "training/timeline.h"

#include "tests/commands.h"

namespace streambp {
namespace {

// The numbers of a column: runs of equal differences.
std::vector<std::int64_t> expand(const Json& runs) {
  std::vector<std::int64_t> numbers;
  std::int64_t value = 0;
  for (std::size_t i = 0; i < runs.size(); i += 2)
    for (Index n = runs[i + 1]; n > 0; --n) numbers.push_back(value += runs[i].get<std::int64_t>());
  return numbers;
}

// The memory of each operation of a step, in order, and its work.
struct Moments {
  explicit Moments(const Json& timeline) {
    const Json& cells = timeline["cells"];
    std::vector<std::vector<std::int64_t>> memory;
    for (const Json& kind : cells["memory"]) memory.push_back(expand(kind));
    const auto lists = expand(cells["list"]);
    for (std::size_t cell = 0; cell < lists.size(); ++cell) {
      for (const Json& number : timeline["lists"][static_cast<std::size_t>(lists[cell])]) {
        const Json& operation = timeline["operations"][number.get<std::size_t>()];
        Bytes now;
        for (std::size_t kind = 0; kind < now.size(); ++kind) now[kind] = static_cast<std::size_t>(memory[kind][cell]);
        for (std::size_t i = 5; i < operation.size(); i += 2)
          now[operation[i]] += static_cast<std::size_t>(operation[i + 1].get<std::int64_t>());
        bytes.push_back(now), flops += operation[1].get<double>(), sent += operation[3].get<double>();
      }
    }
  }
  Bytes highest() const {
    const auto total = [](const Bytes& b) { return std::accumulate(b.begin(), b.end(), std::size_t{0}); };
    return *std::ranges::max_element(bytes, {}, total);
  }

  std::vector<Bytes> bytes;
  double flops = 0, sent = 0;
};

const Rates kRates = usual_rates(DeviceKind::cuda, 128);

TEST(Timeline, HasThePeakAndTheWorkOfThePlan) {
  for (const char* family : {"llama", "gemma3"}) {
    for (OptimizerKind optimizer : {OptimizerKind::none, OptimizerKind::adamw}) {
      for (Index micro_batches : {1, 2, 5}) {
        StepSettings s{make_config(family, {1000, 64, 3, 4, 2, 16, 128, 4096, false}), DType::bf16, optimizer,
                       micro_batches};
        for (Index block : {0, 512}) {
          s.block = block;
          for (Mode mode : kModes) {
            const Schedule schedule = schedule_for(mode, s, 1500, 512);
            const Usage usage = plan(s, 1500, schedule);
            const Moments moments(timeline(s, 1500, schedule, kRates));
            EXPECT_EQ(moments.highest(), usage.by_kind) << family << ", " << name(mode) << ", " << micro_batches;
            if (micro_batches <= 2) {
              EXPECT_EQ(moments.flops, usage.flops);
            }
          }
        }
      }
    }
  }
}

// Saved layer inputs grow in forward and shrink in backward, while the gradient grows.
TEST(Timeline, ShowsSavedInputsGiveWayToTheGradient) {
  const StepSettings s{known_models().at("qwen3-8b"), DType::bf16, OptimizerKind::none, 1};
  const Moments moments(timeline(s, 50000, schedule_for(Mode::stream, s.config, 50000, 2048), kRates));
  const auto of = [&](std::size_t moment, Kind kind) { return moments.bytes[moment][static_cast<std::size_t>(kind)]; };
  std::size_t top = 0;
  while (of(top, Kind::saved) <= of(top + 1, Kind::saved)) ++top;
  EXPECT_EQ(of(top, Kind::saved), std::size_t{50000} * 4096 * 2 * 37);  // 36 inputs and the last output
  for (std::size_t moment = top + 1; moment < moments.bytes.size(); ++moment) {
    EXPECT_LE(of(moment, Kind::saved), of(moment - 1, Kind::saved));
    EXPECT_GE(of(moment, Kind::gradients), of(moment - 1, Kind::gradients));
    EXPECT_EQ(of(moment, Kind::weights), of(0, Kind::weights));
  }
}

// Cells are the walk's: forward upwards, then backward downwards with the last chunk first.
TEST(Timeline, CellsAreThoseOfTheWalk) {
  const StepSettings s{make_config("llama", {1000, 64, 2, 4, 2, 16, 128, 4096, false}), DType::f32,
                       OptimizerKind::none};
  const Json cells = timeline(s, 1000, schedule_for(Mode::stream, s, 1000, 512), kRates)["cells"];
  const Json passes = timeline(s, 1000, schedule_for(Mode::stream, s, 1000, 512), kRates)["passes"];
  const auto pass = expand(cells["pass"]), layer = expand(cells["layer"]), begin = expand(cells["begin"]);
  std::vector<std::string> walk;
  for (std::size_t i = 0; i < pass.size(); ++i) {
    if (layer[i] < 0 || layer[i] == 2) continue;
    walk.push_back(passes[static_cast<std::size_t>(pass[i])].get<std::string>() + " " + std::to_string(layer[i]) + " " +
                   std::to_string(begin[i]));
  }
  std::vector<std::string> expected = {"forward 0 0", "forward 0 512", "forward 1 0", "forward 1 512"};
  for (const char* l : {"1", "0"})
    for (const char* pass : {"summary L 0", "summary L 512", "backward L 512", "backward L 0"})
      expected.push_back(std::string(pass).replace(std::string(pass).find('L'), 1, l));
  EXPECT_EQ(walk, expected);
}

TEST_F(Commands, PlanRefusesAnUnwritablePageBeforeTheWork) {
  expect_refused("plan qwen3-8b --timeline nowhere/step.html", "nowhere");
  expect_refused("plan qwen3-8b --timeline " + dir.string(), "directory");
  expect_refused("plan qwen3-8b --timeline step.json", "let it end in .html");
  EXPECT_FALSE(contains(execute("plan qwen3-8b --timeline nowhere/step.html").output, "FLOPs"));
  std::ofstream("mine.html") << "<p>mine";
  expect_refused("plan qwen3-8b --timeline mine.html", "may be yours");
}

}  // namespace
}  // namespace streambp
