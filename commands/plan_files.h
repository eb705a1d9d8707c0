// Files of `plan` that scripts/plot.py draws.
#pragma once

#include "data/files/json.h"
#include "training/settings.h"

namespace streambp {

// What was planned: of a step of this model, and the answers so far.
struct Planned {
  const StepSettings& settings;
  Index chunk;
  const Json& answers;
};

// Peak memory against length, in the three modes.
void write_sweep(const std::string& file, const Planned& planned);
// Memory by kind through one step, in the three modes.
void write_timeline(const std::string& file, Index rows, const Planned& planned);

}  // namespace streambp
