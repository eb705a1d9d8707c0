// Safetensors files: round trips; damaged files give an error with the cause and never a crash.
#include <cstring>
#include <ctime>
#include <fstream>
#include <limits>

#include "data/files/safetensors.h"
#include "tests/support.cuh"

namespace streambp {
namespace {

namespace fs = std::filesystem;
using Metadata = std::map<std::string, std::string>;

class Safetensors : public TemporaryDirectory {
 protected:
  fs::path path() const { return dir / "model.safetensors"; }
  void put(const std::string& bytes) const {
    fs::remove(path());  // ext4 flushes a file that is truncated and written again
    std::ofstream(path(), std::ios::binary) << bytes;
  }
  void put(const std::string& header, const std::string& data) const {
    const std::uint64_t length = header.size();
    put(std::string(reinterpret_cast<const char*>(&length), 8) + header + data);
  }
};

template <class T>
std::vector<T> values(const SafetensorsFile& file, const std::string& name) {
  return numbers<T>(file.at(name));
}

template <class T>
void add(SafetensorsWriter& writer, const std::string& name, const std::string& dtype, const std::vector<T>& data) {
  writer.add(name, dtype, {static_cast<Index>(data.size())}, data.data(), data.size() * sizeof(T));
}

TEST_F(Safetensors, RoundTrip) {
  const std::vector<float> f32 = {1.5f, -0.0f, 3e-39f, std::numeric_limits<float>::infinity(), 0.1f, 7};
  const std::vector<double> f64 = {0.1, -1e300};
  const std::vector<std::int32_t> i32 = {-5, 2147483647};
  const std::vector<std::int64_t> i64 = {-5, std::int64_t{1} << 40};
  const std::vector<std::uint8_t> u8 = {0, 200, 255};
  {
    SafetensorsWriter writer(path(), {{"format", "pt"}, {"note", "\"quoted\" \n é"}});
    add(writer, "bytes", "U8", u8);  // an odd length: what follows is not aligned
    writer.add("wte.weight", "F32", {2, 3}, f32.data(), 24);
    add(writer, "double", "F64", f64);
    add(writer, "int", "I32", i32);
    add(writer, "long", "I64", i64);
    writer.add("scalar", "F32", {}, f32.data() + 4, 4);
    writer.add("empty", "F32", {0, 5}, nullptr, 0);
    writer.add("produced", "F32", {2}, [&](std::ostream& out) {
      for (int i = 0; i < 2; ++i) out.write(reinterpret_cast<const char*>(&f32[i]), 4);
    });
    EXPECT_TRUE(files().empty());
    writer.finish();
    EXPECT_EQ(files(), std::vector<std::string>{"model.safetensors"});
  }
  std::uint64_t header_length;
  const std::string raw = read_file(path());
  std::memcpy(&header_length, raw.data(), 8);
  EXPECT_EQ(header_length % 8, 0u);
  EXPECT_LT(raw.find("\"bytes\""), raw.find("\"wte.weight\""));  // in the order of insertion
  EXPECT_LT(raw.find("\"long\""), raw.find("\"empty\""));

  const SafetensorsFile file(path());
  EXPECT_EQ(file.path(), path());
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}, {"note", "\"quoted\" \n é"}}));
  EXPECT_EQ(file.tensors().size(), 8u);
  EXPECT_EQ(file.at("wte.weight").shape, (std::vector<Index>{2, 3}));
  const auto reals = values<float>(file, "wte.weight");
  EXPECT_EQ(std::memcmp(reals.data(), f32.data(), 24), 0);
  EXPECT_EQ(values<double>(file, "wte.weight"), std::vector<double>(f32.begin(), f32.end()));
  EXPECT_EQ(values<double>(file, "double"), f64);
  EXPECT_EQ(values<float>(file, "double")[0], 0.1f);
  EXPECT_EQ(values<std::int32_t>(file, "int"), i32);
  EXPECT_EQ(values<Index>(file, "int"), (std::vector<Index>{-5, 2147483647}));
  EXPECT_EQ(values<Index>(file, "long"), i64);
  EXPECT_EQ(values<std::uint8_t>(file, "bytes"), u8);
  EXPECT_EQ(values<float>(file, "scalar"), std::vector<float>{0.1f});
  EXPECT_TRUE(file.at("scalar").shape.empty());
  EXPECT_TRUE(values<float>(file, "empty").empty());
  EXPECT_EQ(values<float>(file, "produced"), (std::vector<float>{1.5f, -0.0f}));
  EXPECT_EQ(file.find("wpe.weight"), nullptr);

  std::string message = error_of([&] { file.at("wte.wait"); });
  EXPECT_PRED2(contains, message, path().string());
  EXPECT_PRED2(contains, message, "\"wte.weight\"");
  message = error_of([&] { values<std::int32_t>(file, "long"); });
  EXPECT_PRED2(contains, message, "\"long\": 1099511627776 is out of range");
  EXPECT_ERROR(values<float>(file, "long"), "cannot read type I64 as real numbers");
  EXPECT_ERROR(values<Index>(file, "double"), "cannot read type F64 as integers");

  const auto survivor = std::make_unique<SafetensorsFile>(file);  // a copy shares the mapping
  EXPECT_EQ(values<double>(*survivor, "double"), f64);
}

TEST_F(Safetensors, WriterRefuses) {
  const float x[2] = {1, 2};
  SafetensorsWriter writer(path(), {});
  writer.add("a", "F32", {2}, x, 8);
  EXPECT_ERROR(writer.add("a", "F32", {2}, x, 8), "is a duplicate");
  EXPECT_ERROR(writer.add("__metadata__", "F32", {2}, x, 8), "is a duplicate");
  EXPECT_ERROR(writer.add("b", "F31", {2}, x, 8), "F31");
  EXPECT_ERROR(writer.add("b", "F32", {-2}, x, 8), "shape [-2]");
  writer.add("short", "F32", {2}, x, 4);
  EXPECT_ERROR(writer.finish(), "tensor \"short\"");
  EXPECT_TRUE(files().empty());
}

TEST_F(Safetensors, DamageIsRefusedWithTheCause) {
  const std::string good = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  const std::string data(8, '\1');
  put("{" + good + "}", data);
  EXPECT_EQ(error_of([&] { SafetensorsFile{path()}; }), "");
  put("{" + good + "}   ", data);
  EXPECT_EQ(error_of([&] { SafetensorsFile{path()}; }), "");

  struct Case {
    std::string header, part_of_message;
  };
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  const auto repeated = [](const std::string& text, int times) {
    std::string all;
    for (int i = 0; i < times; ++i) all += text;
    return all;
  };
  const std::vector<Case> cases = {
      {"", "header"},
      {"{", "header"},
      {"[]", "object"},
      {"7", "object"},
      {"{" + good + "} x", "header"},
      {"{" + good + "}" + std::string(1, '\0'), "header: not valid JSON: byte 55 is NUL"},
      {"{\"\xff\":1}", "header"},
      {"{" + good + "," + good + "}", "duplicate key \"a\""},
      {R"({"a":7})", "\"a\""},
      {R"({"a":{}})", "dtype"},
      {R"({"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})", "string"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", "data_offsets"},
      {"{" + good + R"(,"__metadata__":{"x":1}})", "string"},
      {"{" + good + R"(,"__metadata__":[]})", "object"},
      {tensor("F32", "[-2]", "[0,8]"), "lists of numbers"},
      {tensor("F32", "[2.0]", "[0,8]"), "lists of numbers"},
      {tensor("F32", "[true,2]", "[0,8]"), "lists of numbers"},
      {tensor("F32", "\"2\"", "[0,8]"), "lists of numbers"},
      {tensor("F32", "{\"n\":2}", "[0,8]"), "lists of numbers"},
      {tensor("F32", "[9223372036854775808]", "[0,8]"), "lists of numbers"},
      {tensor("F32", "[99999999999999999999]", "[0,8]"), "lists of numbers"},
      {tensor("F32", "[1e999]", "[0,8]"), "header"},
      {tensor("F32", "[4294967296,4294967296]", "[0,8]"), "no tensor can have the shape"},
      {tensor("F32", "[4611686018427387905]", "[0,8]"), "no tensor can have the shape"},
      {tensor("F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]"), "has 9 dimensions; at most 8 are supported"},
      {tensor("F32", "[1" + repeated(",1", 100'000) + "]", "[0,8]"), "has 100001 dimensions"},
      {tensor("F32", "[2]", "[0]"), "a begin and an end"},
      {tensor("F32", "[2]", "[0,4,8]"), "a begin and an end"},
      {tensor("F32", "[2]", "[8,0]"), "a begin and an end"},
      {tensor("F32", "[2]", "[0,9]"), "truncated"},
      {tensor("F32", "[2]", "[0,9223372036854775807]"), "truncated"},
      {tensor("F32", "[3]", "[0,8]"), "takes 12 bytes, not 8"},
      {tensor("F64", "[2]", "[0,8]"), "takes 16 bytes, not 8"},
      {tensor("F32", "[1]", "[0,4]"), "belong to no tensor"},
      {tensor("F32", "[1]", "[4,8]"), "does not begin where"},
      {"{" + good + R"(,"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "does not begin where"},
      {"{" + good + R"(,"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "does not begin where"},
      {"{\"a\":" + std::string(1'000'000, '['), "header: nested more deeply than 3 levels"},
      {tensor("F32", "[[2]]", "[0,8]"), "nested more deeply"},
      {tensor("F32", "[" + std::string(2'000'000, '0') + "]", "[0,8]"), "not valid JSON"},
      {tensor(std::string(1'000'000, 'F'), "[2]", "[0,8]"), "FFF...\" is not a type"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.header.substr(0, 120));
    put(c.header, data);
    const std::string message = error_of([&] { SafetensorsFile{path()}; });
    EXPECT_PRED2(contains, message, path().string() + ":");
    EXPECT_PRED2(contains, message, c.part_of_message);
    EXPECT_LT(message.size(), 1000u);
  }

  put(tensor("F8_E4M3", "[8]", "[0,8]"), data);  // unknown types are listed, but cannot be read
  const SafetensorsFile file(path());
  EXPECT_EQ(file.at("a").dtype, "F8_E4M3");
  EXPECT_ERROR(values<float>(file, "a"), "cannot read type F8_E4M3");
}

TEST_F(Safetensors, NotASafetensorsFile) {
  const auto expect_refused = [&](const fs::path& path, const std::string& part) {
    const std::string message = error_of([&] { SafetensorsFile{path}; });
    EXPECT_PRED2(contains, message, path.string() + ":");
    EXPECT_PRED2(contains, message, part);
  };
  expect_refused(dir / "missing", "no such file");
  expect_refused(path(), "no such file");
  expect_refused(dir, "directory");
  expect_refused("/dev/null", "not a regular file");
  put("");
  expect_refused(path(), "too few");
  expect_refused(path() / "below-a-file", "no such file");
  put("1234567");
  expect_refused(path(), "too few");
  put(std::string("\x09\0\0\0\0\0\0\0{}", 10));
  expect_refused(path(), "claims a header of 9 bytes");
  put(std::string(100, '\xff'));
  expect_refused(path(), "claims a header");
  put("{}", "");
  EXPECT_TRUE(SafetensorsFile(path()).tensors().empty());
  EXPECT_ERROR(SafetensorsFile(path()).at("a"), "no tensor \"a\"");
}

TEST_F(Safetensors, HugeHeadersAreRefusedAfterBoundedWork) {
  std::string header = R"({"a":{"shape":[0)";
  for (int i = 0; i < 1'000'000; ++i) header += ",0";
  put(header + R"(],"dtype":"F32","data_offsets":[0,0]}})", "");
  EXPECT_ERROR(SafetensorsFile{path()}, "header: more than 1000000 values");
}

TEST_F(Safetensors, AFailingProducerLeavesNoFile) {
  SafetensorsWriter writer(path(), {});
  writer.add("x", "F32", {1}, [](std::ostream& out) {
    out << "ab";
    fail("out of ideas");
  });
  EXPECT_EQ(error_of([&] { writer.finish(); }), "out of ideas");
  EXPECT_TRUE(files().empty());
}

}  // namespace
}  // namespace streambp
