// What report.html and TensorBoard get of a run: thinned curves that hide no peak, and records that are whole.
#include "data/files/run_log.h"

#include "commands/page.h"
#include "data/files/event_file.h"
#include "tests/temporary.h"

namespace streambp {
namespace {

TEST(MetricSeries, KeepsEveryPeakOfAMillionSteps) {
  MetricSeries series;
  for (Index step = 1; step <= 1'000'000; ++step)
    series.add(step, step == 654'321 ? 99.0 : step == 7 ? -5.0 : step == 500'000 ? NAN : std::sin(step) + 2);
  const Json json = series.json();
  const std::size_t points = json["steps"].size();
  EXPECT_GE(points, 300u);
  EXPECT_LE(points, 600u);
  EXPECT_EQ(json["steps"].back(), 1'000'000);
  EXPECT_EQ(*std::ranges::max_element(json["high"]), 99.0);
  EXPECT_EQ(*std::ranges::min_element(json["low"]), -5.0);
  EXPECT_EQ(json["not_finite"], Json({500'000}));
  double sum = 0;
  for (const Json& mean : json["mean"]) sum += mean.get<double>();
  EXPECT_NEAR(sum / static_cast<double>(points), 2, 0.01);
  EXPECT_LT(json.dump().size(), 30'000u);
}

TEST(MetricSeries, KeepsTheValuesOfAShortRun) {
  MetricSeries series;
  for (Index step = 1; step <= 600; ++step) series.add(step, 1.0 / static_cast<double>(step));
  const Json json = series.json();
  EXPECT_EQ(json["steps"].size(), 600u);
  EXPECT_FALSE(json.contains("low"));
  EXPECT_EQ(json["mean"][2], 0.33333);
}

using RunLogs = TemporaryDirectory;

TEST_F(RunLogs, LeaveOutLinesThatAreNestedDeeply) {
  const std::string deep = "{\"step\": 2, \"x\": " + std::string(300'000, '[') + std::string(300'000, ']') + "}\n";
  write("metrics.jsonl", "{\"step\": 1, \"loss\": 2}\n" + deep + "{\"step\": 3, \"loss\": 1}\n");
  const Json log = RunLog(dir / "metrics.jsonl").json();
  EXPECT_EQ(log["damaged"], 1);
  EXPECT_EQ(log["series"]["loss"]["steps"], Json({1, 3}));
}

// The records of an event file, with checked lengths.
std::vector<std::string> records(const fs::path& directory) {
  fs::path path;
  for (const auto& entry : fs::directory_iterator(directory)) path = entry.path();
  std::ifstream file(path, std::ios::binary);
  std::vector<std::string> all;
  for (std::uint64_t length = 0; file.read(reinterpret_cast<char*>(&length), 8);) {
    std::string text(length, '\0'), sum(4, '\0');
    file.read(sum.data(), 4);
    EXPECT_TRUE(file.read(text.data(), static_cast<std::streamsize>(length)));
    EXPECT_TRUE(file.read(sum.data(), 4));
    all.push_back(text);
  }
  return all;
}

using EventFiles = TemporaryDirectory;

// scripts/check_tensorboard.py reads such a file with the tensorboard package.
TEST_F(EventFiles, HoldScalarsTextsAndHyperparameters) {
  {
    EventFile events(dir, 3);
    events.add(
        {{"step", 3}, {"begin", {{"command", "train it"}, {"options", {{"--rate", 0.5}, {"--mode", "stream"}}}}}});
    events.add({{"step", 4}, {"loss", 1.5}, {"gradient_fingerprint", "abc"}});
    events.add({{"step", 4}, {"sample", {{"prompt", "once"}, {"text", " upon"}}}});
  }
  const std::vector<std::string> all = records(dir);
  ASSERT_EQ(all.size(), 6u);
  EXPECT_PRED2(contains, all[0], "brain.Event:2");
  EXPECT_PRED2(contains, all[2], "_hparams_/session_start_info");
  EXPECT_PRED2(contains, all[3], "train it");
  EXPECT_PRED2(contains, all[4], std::string("\x2a\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\xc0\x3f", 15));  // 1.5f
  EXPECT_FALSE(contains(all[4], "abc"));
  EXPECT_PRED2(contains, all[5], "once upon");
}

TEST_F(EventFiles, HaveTheChecksumsOfTheFormat) {
  { EventFile events(dir, 0); }
  fs::path path;
  for (const auto& entry : fs::directory_iterator(dir)) path = entry.path();
  std::string start(12, '\0');
  std::ifstream(path, std::ios::binary).read(start.data(), 12);
  // The masked CRC-32C of the length 24, as TensorFlow writes it.
  EXPECT_EQ(start, std::string("\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22", 12));
}

}  // namespace
}  // namespace streambp
