// Shared by the tests of the referee: a step, and what writes a gradient and asks for its explanation.
#pragma once

#include "referee/referee.h"
#include "tests/byte_model.h"
#include "tests/recorded.h"
#include "tests/support.cuh"

namespace streambp {

// Two ranks with two micro-batches each, of unequal rows, some with several documents, some with prompts.
inline RecordedStep recorded(const Config& c) {
  RecordedStep step;
  std::uint64_t seed = 1;
  for (const std::vector<Lengths>& rows :
       std::vector<std::vector<Lengths>>{{{70, 20}, {31}}, {{12, 9, 40}}, {{33}, {50, 6}}, {{64, 25, 11}}}) {
    RecordedBatch b;
    b.file = step.batches.size() / 2;
    std::vector<Batch> of_rows;
    for (const Lengths& documents : rows) {
      of_rows.push_back(packed(c, documents, ++seed));
      for (Index t = 0; t < of_rows.back().size(); ++t)
        b.rows.push_back(static_cast<std::int32_t>(of_rows.size()) - 1),
            b.columns.push_back(static_cast<std::int32_t>(t) + 5);
    }
    b.batch = end_to_end(of_rows);
    for (const std::int32_t target : b.batch.targets) b.batch.advantages.push_back(target >= 0);
    b.padded_size = 2 * b.batch.size();
    step.batches.push_back(b);
  }
  step.files = 2;
  return step;
}

class Referees : public TemporaryDirectory {
 protected:
  void write(const Config& c, const CaseGradients::Result& gradient) const {
    Tensors<float> tensors(c);
    const Table<float> rows = trained(table(c, tensors));
    std::list<std::vector<float>> memory;
    allocate(memory, rows);
    Cpu host(0);
    for (std::size_t i = 0; i < rows.size(); ++i)
      host.upload(*rows[i].matrix, std::vector<float>(gradient.values[i].begin(), gradient.values[i].end()).data());
    SafetensorsWriter writer(path(), {});
    write_tensors(host, writer, "", rows);
    writer.finish();
  }
  std::string path() const { return (dir / "gradient.safetensors").string(); }

  // f(referee) of the gradient that was written, when it knows these roundings
  template <class F>
  auto with_referee(const TrainingCase& correct, CaseGradients& gradients, const std::vector<Types>& roundings,
                    F&& f) const {
    const RecordedGradient recorded({path()}, correct.config);
    Referee referee(correct, DType::f64, recorded, gradients);
    referee.compare(gradients.compute(correct, {DType::f64}));
    for (const Types& types : roundings) referee.compute_rounding(types);
    return f(referee);
  }
  bool is_right(const TrainingCase& correct, CaseGradients& gradients) const {
    return with_referee(correct, gradients, {{DType::f32}}, [](Referee& r) { return r.explained() == 0; });
  }
  // The referee's explanations of the gradient that was written; none if it is right.
  std::vector<Explanation> explain(const TrainingCase& correct, CaseGradients& gradients,
                                   const std::vector<Types>& roundings = {{DType::f32}}) const {
    return with_referee(correct, gradients, roundings, [](Referee& referee) -> std::vector<Explanation> {
      if (referee.explained() == 0) return {};
      if (referee.explained() < referee.roundings().size()) return referee.explain_better();
      return referee.explain([](const std::string&, bool) { return true; });
    });
  }
};

// A layer of each kind.
inline Config small_hybrid() {
  Config c = make_config("qwen3_5", {13, 16, 2, 2, 1, 8, 12, 0, false});
  c.mixers = {MixerKind::delta_rule, MixerKind::attention}, c.rotary_share = 0.5;
  return c;
}

class SmallReferees : public Referees {
 protected:
  void SetUp() override {
    Referees::SetUp();
    save_random_model(dir / "model", correct.config);
    correct.step = recorded(correct.config);
  }
  CaseGradients::Result in_float32(const TrainingCase& c) { return gradients.compute(c, {DType::f32}); }
  const Defect& named(const std::string& name) const {
    return *std::ranges::find_if(all_defects(), [&](const Defect& d) { return d.name == name; });
  }
  // The gradient of this case, in float32, has this explanation first.
  void expect_found(const TrainingCase& wrong, const std::string& name, const std::string& detail = "") {
    write(correct.config, in_float32(wrong));
    const std::vector<Explanation> found = explain(correct, gradients);
    ASSERT_FALSE(found.empty()) << name;
    EXPECT_EQ(found.front().defects, std::vector<const Defect*>{&named(name)}) << name;
    EXPECT_PRED2(contains, found.front().detail, detail);
  }

  TrainingCase correct{make_config("qwen2", {31, 16, 2, 2, 1, 8, 24, 0, false}), {}};
  CaseGradients gradients{[this](Engine& engine) { engine.load(dir / "model"); }};
};

}  // namespace streambp
