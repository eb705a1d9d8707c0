// The version of the program. CMakeLists.txt generates version.cpp.
#pragma once

namespace streambp {

extern const char* const kVersion;
extern const char* const kCommit;  // "unknown" in a source tree without git

}  // namespace streambp
