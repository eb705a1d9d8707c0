// The part of `streambp verify` that judges another trainer's gradient.
#pragma once

#include "commands/option_table.h"
#include "referee/referee.h"

namespace streambp {

enum class Verdict { right, wrong, undecided = 3 };  // and the exit code; 2: an error

class RefereeOptions {
 public:
  void add_to(OptionTable& options);
  bool reads_a_step() const { return !batches_.empty() || !against_.empty(); }
  bool given() const { return !batches_.empty() || !against_.empty() || !defect_.empty(); }

  // The model whose gradient is judged.
  struct Subject {
    Config config;
    DType dtype;         // of the exact gradient
    std::uint64_t seed;  // of a random step
    CaseGradients::Fill fill;
    std::string description;
  };
  // What is shown and saved. Returns the exit code.
  struct Outputs {
    std::function<void(const HostTensors&)> save_gradient;  // may be empty
    std::function<void(const Json&)> write;
  };
  int run(const Subject& subject, const Outputs& outputs) const;

 private:
  void announce(const RecordedStep& step) const;
  Verdict judge(Referee referee, CaseGradients::Result exact, const RecordedGradient& recorded, Json& json) const;

  std::vector<std::string> batches_, against_;
  std::string defect_, computed_in_ = "auto";
  double minutes_ = 10;
};

}  // namespace streambp
