// The fixture of the fuzz tests: runs a parser on damaged seeds, which are small valid files.
//
//   STREAMBP_FUZZ_CASES   cases for each test; default 2000, with sanitizers 1000
//   STREAMBP_FUZZ_FIRST   the number of the first case
#pragma once

#include <omp.h>

#include "tests/commands.h"
#include "tests/fuzz.h"
#include "tests/support.cuh"

namespace streambp {

class Fuzz : public Commands {
 protected:
  void SetUp() override {
    omp_set_num_threads(1);  // fork copies only the calling thread
    Commands::SetUp();
    fs::remove_all(dir);
    dir = (fs::is_directory("/dev/shm") ? "/dev/shm" : dir.parent_path()) / dir.filename();  // many small writes
    fs::create_directories(dir);
    folder.emplace(dir / "case");
  }

  void fuzz(const std::vector<Files>& seeds, const std::function<void(const Files&)>& run) {
    const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    const FuzzTarget target{name, seeds, run};
    for (const Files& seed : seeds) {
      try {
        run(seed);
      } catch (const std::exception& error) {
        FAIL() << "a seed is invalid: " << error.what();
      }
    }
    const Index count = from_environment("STREAMBP_FUZZ_CASES", sized(2000, 1000));
    const Index first = from_environment("STREAMBP_FUZZ_FIRST", 0);
    Fuzzer fuzzer(target);
    const FuzzReport r = fuzzer.run(first, count);
    std::printf(
        "%-18s %ld cases in %.0f s, %ld accepted; slowest %.3f s (%ld), most memory %.2f MiB (%ld), process %zu MiB\n",
        name.c_str(), r.cases, r.seconds, r.accepted, r.slowest, r.slowest_case,
        static_cast<double>(r.largest) / (1 << 20), r.largest_case, r.resident >> 20);
    EXPECT_EQ(r.failure, "");
    EXPECT_EQ(r.cases, count);
    if (!r.failure.empty()) {
      const fs::path kept = fs::path(testing::TempDir()) / ("fuzz-" + name + "-" + std::to_string(first + r.cases));
      fs::create_directories(kept);
      for (const auto& [file, contents] : fuzzer.files(first + r.cases)) write_file_atomically(kept / file, contents);
      std::printf("its files are in %s\n", kept.c_str());
    }
    if (count < 1000) return;
    EXPECT_GT(r.accepted, 0);  // if all or no cases pass, the damage tests only one check
    EXPECT_LT(r.accepted, count);
  }

  // The contents of a directory.
  static Files files_in(const fs::path& path) {
    Files files;
    for (const auto& entry : fs::directory_iterator(path)) files[entry.path().filename()] = read_file(entry.path());
    return files;
  }
  std::string written(const std::function<void(const fs::path&)>& write) {
    write(dir / "file");
    std::string contents = read_file(dir / "file");
    fs::remove(dir / "file");
    return contents;
  }

  std::optional<CaseFolder> folder;
};

}  // namespace streambp
