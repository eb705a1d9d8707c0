// What the build decides about GPUs, on machines of all kinds: nvidia-smi and nvcc are shell scripts here.
#include "tests/commands.h"

namespace streambp {
namespace {

class Gpus : public TemporaryDirectory {
 protected:
  void add_program(const std::string& name, const std::string& script) {
    write("bin/" + name, "#!/bin/sh\n" + script + "\n");
    fs::permissions(path("bin/" + name), fs::perms::owner_all);
  }

  // A machine with these GPUs ("none": nvidia-smi fails), this CUDA toolkit (empty: none), and a driver or not. Returns why
  // it gets no GPU code, and the architectures that it gets code for.
  std::string decision(const std::string& gpus, const std::string& toolkit, bool driver, const char* wanted = "AUTO") {
    fs::remove_all(path("bin"));
    add_program("nvidia-smi", gpus == "none" ? "exit 9" : "printf '" + gpus + "'");
    if (!toolkit.empty())
      add_program("nvcc", "case $1 in --version) echo 'tools, release " + toolkit + ", V" + toolkit +
                              "';; *) echo sm_80; echo sm_89; echo sm_90; echo sm_100;; esac");
    write("driver", "");
    write("ask.cmake", std::string("set(STREAMBP_CUDA ") + wanted +
                           ")\nset(usual_toolkits /nowhere)\nset(driver_files " +
                           (driver ? path("driver") : "/nowhere") +
                           ")\ninclude(" STREAMBP_SOURCE
                           "/cmake/gpus.cmake)\nmessage(\"${no_gpu_code}|${CMAKE_CUDA_ARCHITECTURES}\")\n");
    std::string cmake = execute("-c 'command -v cmake'", "sh").output;
    cmake.pop_back();
    std::string said =
        execute("-u CUDA_HOME -u CUDA_PATH PATH=" + path("bin") + " " + cmake + " -P " + path("ask.cmake"), "env")
            .output;
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

}  // namespace
}  // namespace streambp
