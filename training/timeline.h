// A training step as a list of cells, recorded from the step itself on the Plan device. `plan --timeline` writes it into a
// page that plays it (pages/step.js).
//
//   cell        a pass through a layer for some rows: what streambp.cuh opens a scope for, or what lies between two of them
//   operation   what it costs, and by how many bytes of each kind the memory in use differs from that at the cell's start
//
// Most cells are alike, so each operation and each list of operations is stored once, and numbers of cells as runs of equal
// differences.
#pragma once

#include "text/json.h"
#include "training/fit.h"

namespace streambp {

Json timeline(const StepSettings& settings, Index rows, const Schedule& schedule, const Rates& rates);

}  // namespace streambp
