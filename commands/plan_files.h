// Files of `plan`: a page that plays the step, and what scripts/plot.py draws.
#pragma once

#include "commands/page.h"
#include "training/fit.h"

namespace streambp {

// What was planned: of a step of this model, and the answers so far.
struct Planned {
  const StepSettings& settings;
  Index chunk;
  const Json& answers;
};

// Peak memory against length, in the three modes.
void write_sweep(const std::string& file, const Planned& planned);
// Another step: with settings that the user has given, or else the fastest that fits.
struct ChosenStep {
  StepSettings settings;
  bool given;
};
// A step in the three modes, chunk by chunk, and as chosen if that differs, as a page that plays it.
void write_timeline(const std::string& file, Index rows, const Planned& planned, const ChosenStep& chosen,
                    const Rates& rates);

}  // namespace streambp
