// llm.c's token files: 256 int32 (magic, version, count, ...), then the tokens. Each document starts with GPT-2's
// end-of-text token or Llama 3's begin-of-text token. The loss covers all other tokens.
#pragma once

#include "data/documents/token_writer.h"

namespace streambp {

struct LlmcHeader {
  std::size_t width, tokens;  // bytes per token; number of tokens
  std::int32_t first;         // the token that starts each document
};

inline LlmcHeader read_llmc_header(const fs::path& path, std::ifstream& file) {
  const std::size_t size = regular_file_size(path);
  std::array<std::int32_t, 256> header{};
  require(size >= sizeof header && file.read(reinterpret_cast<char*>(header.data()), sizeof header), path.string(),
          ": ", size, " bytes are too few for a token file; download it again");
  const bool gpt2 = header[0] == 20240520 && header[1] == 1, llama3 = header[0] == 20240801 && header[1] == 7;
  require(gpt2 || llama3, path.string(), ": magic number ", header[0], " and version ", header[1],
          " are neither GPT-2's (20240520, 1) nor Llama 3's (20240801, 7); use a .safetensors token file instead");
  const std::size_t width = gpt2 ? 2 : 4, room = (size - sizeof header) / width;
  require(header[2] >= 0 && static_cast<std::size_t>(header[2]) == room && (size - sizeof header) % width == 0,
          path.string(), ": claims ", header[2], " tokens, but has room for ", room, "; download it again");
  return {width, room, gpt2 ? 50256 : 128000};
}

inline void add_bin_file(const fs::path& path, TokenWriter& writer) {
  std::ifstream file(path, std::ios::binary);
  const auto [width, tokens, first] = read_llmc_header(path, file);
  Document document;
  const auto complete = [&] {
    if (!document.tokens.empty()) document.learn[0] = 0, writer.add(document);
    document = {};
  };
  const std::size_t most = std::min(tokens, std::size_t{1} << 20);  // tokens read at once
  std::vector<char> block(width * most);
  for (std::size_t left = tokens; left > 0;) {
    const std::size_t n = std::min(left, most);
    file.read(block.data(), static_cast<std::streamsize>(n * width));
    require(file.good(), path.string(), ": cannot read: ", std::strerror(errno));
    for (std::size_t i = 0; i < n; ++i) {
      std::uint32_t word = 0;
      std::memcpy(&word, block.data() + i * width, width);  // little-endian
      require(word <= INT32_MAX, path.string(), ": token ", word,
              " is outside every vocabulary; download the file again");
      const std::int32_t token = static_cast<std::int32_t>(word);
      if (token == first) complete();
      document.add({&token, 1}, InLoss::yes);
    }
    left -= n;
  }
  complete();
}

}  // namespace streambp
