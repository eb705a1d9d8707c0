// The timeline of `plan`: its maximum is the planned peak, and its output file is checked before the work.
#include "training/timeline.h"

#include "tests/commands.h"

namespace streambp {
namespace {

TEST(Timeline, HasThePeakOfThePlan) {
  for (const char* family : {"llama", "gemma3"}) {
    for (OptimizerKind optimizer : {OptimizerKind::none, OptimizerKind::adamw}) {
      for (Index micro_batches : {1, 2, 5}) {
        const StepSettings s{make_config(family, {1000, 64, 3, 4, 2, 16, 128, 4096, false}), DType::bf16, optimizer,
                             micro_batches};
        for (Mode mode : kModes) {
          const Schedule schedule = schedule_for(mode, s.config, 1500, 512);
          const Usage usage = plan(s, 1500, schedule);
          const Timeline line = timeline(s, 1500, schedule, 300);
          const auto highest = std::max_element(line.parts.begin(), line.parts.end(),
                                                [](const Bytes& a, const Bytes& b) { return total(a) < total(b); });
          EXPECT_EQ(*highest, usage.by_kind) << family << ", " << name(mode) << ", " << micro_batches;
          EXPECT_EQ(total(*highest), usage.peak);
        }
      }
    }
  }
}

// Saved layer inputs grow in forward and shrink in backward, while the gradient grows.
TEST(Timeline, ShowsSavedInputsGiveWayToTheGradient) {
  const StepSettings s{known_models().at("qwen3-8b"), DType::bf16, OptimizerKind::none, 1};
  const Timeline line = timeline(s, 50000, schedule_for(Mode::stream, s.config, 50000, 2048), 100);
  auto bytes = [&](std::size_t part, Kind kind) { return line.parts[part][static_cast<std::size_t>(kind)]; };
  std::size_t top = 0;
  while (top + 1 < line.parts.size() && bytes(top, Kind::saved) <= bytes(top + 1, Kind::saved)) ++top;
  EXPECT_EQ(bytes(top, Kind::saved), std::size_t{50000} * 4096 * 2 * 37);  // 36 inputs and the last output
  EXPECT_NEAR(static_cast<double>(top), 25, 5);                            // forward is a quarter of the work
  for (std::size_t part = top + 1; part < line.parts.size(); ++part) {
    EXPECT_LE(bytes(part, Kind::saved), bytes(part - 1, Kind::saved));
    EXPECT_GE(bytes(part, Kind::gradients), bytes(part - 1, Kind::gradients));
    EXPECT_EQ(bytes(part, Kind::weights), bytes(0, Kind::weights));
  }
}

TEST_F(Commands, PlanWritesATimeline) {
  expect_ok("plan qwen3-0.6b --length 5000 --json plan.json --timeline line.json");
  const Json usage = parse_json_file("plan.json")["usage"];
  const Json line = parse_json_file("line.json");
  ASSERT_EQ(line["kinds"].size(), kKindNames.size());
  for (Mode mode : kModes) {
    std::size_t peak = 0;
    for (const Json& part : line["timeline"][name(mode)]["bytes"]) peak = std::max(peak, total(part.get<Bytes>()));
    EXPECT_EQ(peak, usage[name(mode)]["peak"]) << name(mode);
  }
}

TEST_F(Commands, PlanRefusesAnUnwritableTimelineBeforeTheWork) {
  expect_refused("plan qwen3-8b --timeline nowhere/line.json", "nowhere");
  expect_refused("plan qwen3-8b --timeline " + dir.string(), "directory");
  EXPECT_FALSE(contains(execute("plan qwen3-8b --timeline nowhere/line.json").output, "FLOPs"));
}

}  // namespace
}  // namespace streambp
