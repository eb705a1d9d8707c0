// Which program this is. version.cpp is made from version.cpp.in by the build.
#pragma once

namespace streambp {

extern const char* const kVersion;
extern const char* const kCommit;  // "unknown" in a source tree without git

}  // namespace streambp
