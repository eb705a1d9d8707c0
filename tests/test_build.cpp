// Building on machines of all kinds: package managers, nvidia-smi and nvcc are shell scripts here.
#include <regex>

#include "tests/commands.h"

namespace streambp {
namespace {

class Build : public TemporaryDirectory {
 protected:
  void add_program(const std::string& name, const std::string& script) {
    write("bin/" + name, "#!/bin/sh\n" + script + "\n");
    fs::permissions(path("bin/" + name), fs::perms::owner_all);
  }

  // What a script for cmake -P says, with these programs only.
  std::string cmake_says(const std::string& script) {
    write("ask.cmake", script);
    std::string cmake = execute("-c 'command -v cmake'", "sh").output;
    cmake.pop_back();
    return execute("-u CUDA_HOME -u CUDA_PATH PATH=" + path("bin") + " " + cmake + " -P " + path("ask.cmake"), "env")
        .output;
  }
};

class Gpus : public Build {
 protected:
  // A machine with these GPUs ("none": nvidia-smi fails), this CUDA toolkit (empty: none), and a driver or not. Returns why
  // it gets no GPU code, and the architectures that it gets code for.
  std::string decision(const std::string& gpus, const std::string& toolkit, bool driver, const char* wanted = "AUTO") {
    fs::remove_all(path("bin"));
    add_program("nvidia-smi", gpus == "none" ? "exit 9" : "printf '" + gpus + "'");
    if (!toolkit.empty())
      add_program("nvcc", "case $1 in --version) echo 'tools, release " + toolkit + ", V" + toolkit +
                              "';; *) echo sm_80; echo sm_89; echo sm_90; echo sm_100;; esac");
    write("driver", "");
    std::string said = cmake_says(
        std::string("set(STREAMBP_CUDA ") + wanted + ")\nset(usual_toolkits /nowhere)\nset(driver_files " +
        (driver ? path("driver") : "/nowhere") +
        ")\ninclude(" STREAMBP_SOURCE "/cmake/gpus.cmake)\nmessage(\"${no_gpu_code}|${CMAKE_CUDA_ARCHITECTURES}\")\n");
    said.pop_back();
    return said;
  }
};

TEST_F(Gpus, GetTheCodeThatTheyRun) {
  EXPECT_EQ(decision("8.9\\n", "12.4", true), "|89");
  EXPECT_EQ(decision("9.0\\n9.0\\n8.0\\n", "13.0", true), "|90;80");
  EXPECT_EQ(decision("7.5\\n8.9\\n", "13.0", true), "|89") << "one of two can run it";
  EXPECT_EQ(decision("12.0\\n", "12.4", true), "|90") << "newer than the toolkit: PTX";
  EXPECT_EQ(decision("none", "13.0", false, "ON"), "|80-real;90") << "for GPUs elsewhere";
}

TEST_F(Gpus, WithoutCodeAreExplained) {
  EXPECT_EQ(decision("none", "13.0", false), "this machine has no GPU (-DSTREAMBP_CUDA=ON compiles for others)|");
  EXPECT_EQ(decision("none", "", false),
            "nvcc was not found in PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda or /opt/cuda|");
  const std::string no_nvcc = decision("8.9\\n", "", true);
  EXPECT_TRUE(contains(no_nvcc, "has an NVIDIA GPU. Install the CUDA toolkit, 12.4 or later, and build again|"))
      << no_nvcc;
  EXPECT_EQ(decision("none", "", true), no_nvcc);
  EXPECT_TRUE(contains(decision("none", "13.0", true), "nvidia-smi lists no GPU. Fix that"));
  EXPECT_TRUE(contains(decision("8.9\\n", "12.0", true), "/bin/nvcc is CUDA 12.0. Install CUDA 12.4 or later"));
  EXPECT_TRUE(contains(decision("8.9\\n", "broken", true), "/bin/nvcc is CUDA of an unknown version. Install"));
  EXPECT_EQ(decision("7.5\\n", "13.0", true), "this machine's GPU has compute capability 7.5, and 8.0 is the minimum|");
  EXPECT_EQ(decision("8.9\\n", "13.0", true, "OFF"), "-DSTREAMBP_CUDA=OFF was given|");
  EXPECT_TRUE(contains(decision("none", "12.0", false, "ON"), "STREAMBP_CUDA is ON, but"));
}

TEST_F(Build, FetchesExactlyThePinnedArchives) {
  write("lib-1/lib.h", "a header");
  write("lib-1/src/config.h.generic", "a template");
  ASSERT_EQ(execute("-czf " + path("upstream.tar.gz") + " -C " + path("") + " lib-1", "tar").exit_code, 0);
  const std::string sha256 = execute(path("upstream.tar.gz"), "sha256sum").output.substr(0, 64);
  const auto fetch = [&](const std::string& url, const std::string& hash) {
    return cmake_says("set(fetched " + path("fetched") + ")\nset(STREAMBP_ARCHIVES " + path("archives") +
                      ")\ninclude(" STREAMBP_SOURCE "/cmake/fetch.cmake)\nfetch(lib-1 " + url + " " + hash + ")\n");
  };
  const auto refuses = [](const std::string& said, const std::string& what) {
    return contains(std::regex_replace(said, std::regex("\\s+"), " "), what);
  };
  EXPECT_PRED2(refuses, fetch("file:///nowhere.tar.gz", sha256), "file:///nowhere.tar.gz cannot be downloaded:");
  const std::string url = "file://" + path("upstream.tar.gz");
  EXPECT_PRED2(refuses, fetch(url, std::string(64, '0')), "its SHA-256 is " + sha256 + ", not 0000");
  EXPECT_FALSE(fs::exists(path("fetched")));
  EXPECT_EQ(fetch("file:///nowhere.tar.gz", sha256), "") << "the archive is there now";
  EXPECT_EQ(read_file(path("fetched/lib-1/lib.h")), "a header");
  EXPECT_EQ(read_file(path("fetched/lib-1/src/config.h")), "a template");
}

// Here cmake is installed, and nothing else.
TEST_F(Build, IsSetUpByEveryPackageManager) {
  const auto said_with = [&](const std::string& manager, const std::string& options) {
    fs::remove_all(path("bin")), write("ran", "");
    for (const std::string& name : {manager, std::string("rpm")})
      add_program(name,
                  "for last; do :; done; [ $last = cmake ] || case $1 in -q | -T | list) exit 1 ;; esac\n"
                  "[ $last = cmake ] || echo \"$@\" > " +
                      path("ran"));
    add_program("id", "echo 0");
    const std::string setup = STREAMBP_SOURCE "/scripts/setup.sh " + options;
    const std::string said = execute("PATH=" + path("bin") + " /bin/bash " + setup, "env").output;
    return said + read_file(path("ran"));
  };
  const std::string dnf =
      "cli11-devel json-devel pcre2-devel utf8proc-devel xxhash-devel zlib-devel libzstd-devel libedit-devel";
  EXPECT_EQ(said_with("dnf", "--program"),
            "setup: the package names for dnf are untested\nsetup: installing gcc-c++ make " + dnf +
                "\nsetup: done\ninstall -y -q gcc-c++ make " + dnf + "\n");
  const std::string pacman = "gcc make cli11 nlohmann-json pcre2 libutf8proc xxhash zlib zstd libedit gtest openmpi";
  EXPECT_PRED2(contains, said_with("pacman", ""), "untested\nsetup: installing " + pacman);
  EXPECT_PRED2(contains, said_with("pacman", "--arm"), "-S --noconfirm --needed " + pacman + " aarch64-linux-gnu-gcc");
  EXPECT_PRED2(contains, said_with("brew", "--browser"), "install -q libomp cli11 nlohmann-json pcre2 utf8proc");
  EXPECT_PRED2(contains, said_with("brew", "--arm"), "brew has no compiler for --arm");
  EXPECT_PRED2(contains, said_with("dnf", "--all"), "unknown option \"--all\"");
}

}  // namespace
}  // namespace streambp
