// The version of the program. The build generates version.cpp from version.cpp.in.
#pragma once

namespace streambp {

extern const char* const kVersion;
extern const char* const kCommit;  // "unknown" in a source tree without git

}  // namespace streambp
