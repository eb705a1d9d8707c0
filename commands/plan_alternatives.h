// What would fit when a planned step does not.
#pragma once

#include "commands/memory_options.h"
#include "text/json.h"

namespace streambp {

// Prints other options with which a stream of `rows` fits (0: any stream), each with its longest stream. Returns them.
Json print_alternatives(const StepSettings& settings, const Allowed& allowed, Index rows, const MemoryOptions& budget);

}  // namespace streambp
