// Whole files: reading, writing, and what is said if that fails.
#include "data/files/safetensors.h"
#include "tests/temporary.h"

namespace streambp {
namespace {

namespace fs = std::filesystem;

class WholeFiles : public TemporaryDirectory {};

TEST_F(WholeFiles, AreReadAndWritten) {
  const std::string text("line\nzero \0 end", 15);
  write_file_atomically(path("note"), "before");
  write_file_atomically(path("note"), text);
  EXPECT_EQ(read_file(path("note")), text);
  EXPECT_EQ(read_file(path("note"), text.size()), text);
  write_file_atomically(path("empty"), "");
  EXPECT_EQ(read_file(path("empty")), "");
  EXPECT_EQ(files().size(), 2u);
  EXPECT_ERROR(read_file(path("note"), 14), "has 15 bytes, more than the 14");
  fs::resize_file(path("empty"), kLongestText + 1);  // without blocks on disk
  EXPECT_ERROR(read_file(path("empty")), "has 67108865 bytes, more than the 67108864");
  EXPECT_ERROR(read_file(path("missing")), path("missing") + ": no such file");
  EXPECT_ERROR(read_file(dir), "directory");
  EXPECT_ERROR(read_file("/dev/full"), "not a regular file");
}

TEST_F(WholeFiles, UnwritablePathsAreErrors) {
  write_file_atomically(path("note"), "before");
  fs::create_symlink("/dev/full", path("full"));
  fs::create_directory(path("directory"));
  for (const char* place : {"note/below-a-file", "missing/file", "full", "directory"}) {
    const std::string message = error_of([&] { write_file_atomically(dir / place, "after"); });
    EXPECT_PRED2(contains, message, path(place) + ": ");
    EXPECT_PRED2(contains, message, "choose another");
  }
  EXPECT_EQ(files().size(), 3u);
  EXPECT_TRUE(fs::is_symlink(path("full")));
  EXPECT_TRUE(fs::is_empty(path("directory")));
}

// Before the work.
TEST_F(WholeFiles, RequireWritableNamesTheProblem) {
  write("note", "before");
  EXPECT_EQ(error_of([&] { require_writable(dir / "note"); }), "");
  EXPECT_EQ(error_of([&] { require_writable(dir / std::string(200, 'x')); }), "");
  EXPECT_ERROR(require_writable(dir), "is a directory, not a file");
  EXPECT_ERROR(require_writable("/dev/full"), "exists and is not a file");
  EXPECT_ERROR(require_writable(dir / "note/below"), "there is no directory " + path("note"));
  EXPECT_ERROR(require_writable(dir / "missing/file"), "there is no directory " + path("missing"));
  for (const std::size_t length : {246, 300})  // too long under its temporary name, or under its own
    EXPECT_ERROR(require_writable(dir / std::string(length, 'x')), "File name too long; choose a shorter name");
}

TEST(FileTypes, AreToldByTheNameWhateverItsCase) {
  EXPECT_EQ(extension_of("a.b/C.SafeTensors"), ".safetensors");
  EXPECT_EQ(extension_of("a.b/c"), "");
  for (const char* name : {"a.jsonl", "a.JSONL", "a.ndjson", "a.txt.json", "a.jsonl.gz", "a.json.ZST"})
    EXPECT_TRUE(holds_json(name)) << name;
  for (const char* name : {"a.gz", "jsonl", "a.txt", "a.txt.gz", "a.jsonl.xz"}) EXPECT_FALSE(holds_json(name)) << name;
}

// A signal gives up what is unfinished; a second one, or one at another time, ends the process.
TEST_F(WholeFiles, ASignalLeavesNoUnfinishedFile) {
  write("file", "old");
  const auto interrupted = [&](auto&& write) {
    return exit_code_of([&] {
      Unfinished::catch_signals();
      try {
        write();
      } catch (const Cancelled& cancelled) {
        return 100 + cancelled.signal;
      }
      return 0;
    });
  };
  const auto half = [](std::ostream& out) { out << "half", raise(SIGTERM), out << std::string(1 << 20, 'x'); };
  EXPECT_EQ(interrupted([&] { write_file_atomically(dir / "file", half); }), 100 + SIGTERM);
  EXPECT_EQ(interrupted([&] {
              create_directory_atomically(dir / "new", dir / "new.tmp", [&](const std::filesystem::path& made) {
                write_file_atomically(made / "first", "complete");
                write_file_atomically(made / "second", half);
              });
            }),
            100 + SIGTERM);
  EXPECT_EQ(interrupted([] { raise(SIGTERM); }), -SIGTERM);
  EXPECT_EQ(interrupted([] {
              const Unfinished unfinished;  // a signal after the last check
              raise(SIGTERM);
            }),
            -SIGTERM);
  EXPECT_EQ(files(), std::vector<std::string>{"file"});
  EXPECT_EQ(read_file(dir / "file"), "old");
}

TEST_F(WholeFiles, FullDiskKeepsTheOldFile) {
  write_file_atomically(path("note"), "before");
  for (const std::size_t size : {2'000, 200'000}) {  // fails when the stream is closed, fails while it is written
    const std::string contents(size, 'x');
    std::string message, message_of_writer;
    {
      const FileSizeLimit limit(1'000);
      message = error_of([&] { write_file_atomically(path("note"), contents); });
      SafetensorsWriter writer(path("x.safetensors"), {});
      writer.add("x", "U8", {static_cast<Index>(size)}, contents.data(), size);
      message_of_writer = error_of([&] { writer.finish(); });
    }
    EXPECT_PRED2(contains, message, path("note") + ": cannot write: File too large");
    EXPECT_PRED2(contains, message_of_writer, path("x.safetensors") + ": cannot write: File too large");
    EXPECT_EQ(read_file(path("note")), "before");
    EXPECT_EQ(files(), std::vector<std::string>{"note"});
  }
}

}  // namespace
}  // namespace streambp
