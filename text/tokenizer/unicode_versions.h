// Where the `tokenizers` library and ours know different versions of Unicode. Written by
// scripts/make_unicode_versions.py.
// clang-format off
#pragma once

#include <string_view>

namespace streambp::unicode {

// General categories and scripts, each with the characters that are newer than PCRE2's Unicode 14, as ranges of a
// regular expression.
struct Later {
  std::string_view kind, ranges;
};

inline constexpr Later kLater[] = {
    {"Lu", R"(\x{1C89}\x{A7CB}-\x{A7CC}\x{A7DA}\x{A7DC}\x{10D50}-\x{10D65})"},
    {"Ll", R"(\x{1C8A}\x{A7CD}\x{A7DB}\x{10D70}-\x{10D85}\x{1DF25}-\x{1DF2A})"},
    {"Lm", R"(\x{10D4E}\x{10D6F}\x{16D40}-\x{16D42}\x{16D6B}-\x{16D6C}\x{1E030}-\x{1E06D}\x{1E4EB})"},
    {"Lo", R"(\x{105C0}-\x{105F3}\x{10D4A}-\x{10D4D}\x{10D4F}\x{10EC2}-\x{10EC4}\x{1123F}-\x{11240}\x{11380}-\x{11389})"
     R"(\x{1138B}\x{1138E}\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3}\x{11BC0}-\x{11BE0}\x{11F02})"
     R"(\x{11F04}-\x{11F10}\x{11F12}-\x{11F33}\x{1342F}\x{13441}-\x{13446}\x{13460}-\x{143FA}\x{16100}-\x{1611D})"
     R"(\x{16D43}-\x{16D6A}\x{18CFF}\x{1B132}\x{1B155}\x{1E4D0}-\x{1E4EA}\x{1E5D0}-\x{1E5ED}\x{1E5F0}\x{2B739})"
     R"(\x{2EBF0}-\x{2EE5D}\x{31350}-\x{323AF})"},
    {"Mn", R"(\x{897}\x{ECE}\x{10D69}-\x{10D6D}\x{10EFC}-\x{10EFF}\x{11241}\x{113BB}-\x{113C0}\x{113CE}\x{113D0}\x{113D2})"
     R"(\x{113E1}-\x{113E2}\x{11F00}-\x{11F01}\x{11F36}-\x{11F3A}\x{11F40}\x{11F42}\x{11F5A}\x{13440})"
     R"(\x{13447}-\x{13455}\x{1611E}-\x{16129}\x{1612D}-\x{1612F}\x{1E08F}\x{1E4EC}-\x{1E4EF}\x{1E5EE}-\x{1E5EF})"},
    {"Mc", R"(\x{CF3}\x{113B8}-\x{113BA}\x{113C2}\x{113C5}\x{113C7}-\x{113CA}\x{113CC}-\x{113CD}\x{113CF}\x{11F03})"
     R"(\x{11F34}-\x{11F35}\x{11F3E}-\x{11F3F}\x{11F41}\x{1612A}-\x{1612C})"},
    {"Nd", R"(\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{11F50}-\x{11F59}\x{16130}-\x{16139})"
     R"(\x{16D70}-\x{16D79}\x{1CCF0}-\x{1CCF9}\x{1E4F0}-\x{1E4F9}\x{1E5F1}-\x{1E5FA})"},
    {"No", R"(\x{1D2C0}-\x{1D2D3})"},
    {"Pd", R"(\x{10D6E})"},
    {"Po", R"(\x{1B4E}-\x{1B4F}\x{1B7F}\x{113D4}-\x{113D5}\x{113D7}-\x{113D8}\x{11B00}-\x{11B09}\x{11BE1})"
     R"(\x{11F43}-\x{11F4F}\x{16D6D}-\x{16D6F}\x{1E5FF})"},
    {"Sm", R"(\x{10D8E}-\x{10D8F})"},
    {"So", R"(\x{2427}-\x{2429}\x{2FFC}-\x{2FFF}\x{31E4}-\x{31E5}\x{31EF}\x{1CC00}-\x{1CCEF}\x{1CD00}-\x{1CEB3}\x{1F6DC})"
     R"(\x{1F774}-\x{1F776}\x{1F77B}-\x{1F77F}\x{1F7D9}\x{1F8B2}-\x{1F8BB}\x{1F8C0}-\x{1F8C1}\x{1FA75}-\x{1FA77})"
     R"(\x{1FA87}-\x{1FA89}\x{1FA8F}\x{1FAAD}-\x{1FAAF}\x{1FABB}-\x{1FABF}\x{1FAC6}\x{1FACE}-\x{1FACF})"
     R"(\x{1FADA}-\x{1FADC}\x{1FADF}\x{1FAE8}-\x{1FAE9}\x{1FAF7}-\x{1FAF8}\x{1FBCB}-\x{1FBEF})"},
    {"Cf", R"(\x{13439}-\x{1343F})"},
    {"Arabic", R"(\x{897}\x{10EC2}-\x{10EC4}\x{10EFC}-\x{10EFF})"},
    {"Cyrillic", R"(\x{1C89}-\x{1C8A}\x{1E030}-\x{1E06D}\x{1E08F})"},
    {"Devanagari", R"(\x{11B00}-\x{11B09})"},
    {"Han", R"(\x{2B739}\x{2EBF0}-\x{2EE5D}\x{31350}-\x{323AF})"},
    {"Hiragana", R"(\x{1B132})"},
    {"Katakana", R"(\x{1B155})"},
    {"Latin", R"(\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{1DF25}-\x{1DF2A})"},
    {"Lt", ""}, {"Me", ""}, {"Nl", ""}, {"Pc", ""}, {"Ps", ""}, {"Pe", ""}, {"Pi", ""}, {"Pf", ""}, {"Sc", ""},
    {"Sk", ""}, {"Zs", ""}, {"Zl", ""}, {"Zp", ""}, {"Cc", ""}, {"Co", ""}, {"Greek", ""}, {"Hangul", ""},
    {"Hebrew", ""}, {"Thai", ""},
};

// Characters newer than the library's normal forms, which leave them as they are: those that other versions change, and
// neighbours that no version changes.
struct Range {
  char32_t first, last;
};

inline constexpr Range kUnknown[] = {
    {0x7fd,0x7fd}, {0x897,0x8d3}, {0x9fe,0x9fe}, {0xafa,0xaff}, {0xb55,0xb55}, {0xc04,0xc3c}, {0xcf3,0xd00},
    {0xd3b,0xd3c}, {0xd81,0xd81}, {0xeba,0xeba}, {0xece,0xece}, {0x1715,0x1715}, {0x180f,0x180f}, {0x1abf,0x1ace},
    {0x1c89,0x1c8a}, {0x1cf7,0x1cf7}, {0x1df6,0x1dfa}, {0x2427,0x2429}, {0x2ffc,0x2fff}, {0x31e4,0x31ef},
    {0x32ff,0x32ff}, {0xa7cb,0xa7f4}, {0xa82c,0xa82c}, {0xa8ff,0xa8ff}, {0xab69,0xab69}, {0x105c0,0x107ba},
    {0x10d24,0x10f85}, {0x11070,0x11074}, {0x110c2,0x110c2}, {0x11145,0x11146}, {0x111c9,0x111c9}, {0x111ce,0x111cf},
    {0x1123f,0x11241}, {0x1133b,0x1133b}, {0x11380,0x113e2}, {0x1145e,0x1145e}, {0x116d0,0x116e3}, {0x1182c,0x11bf9},
    {0x11d31,0x16139}, {0x16d40,0x16f4f}, {0x16f7f,0x16f87}, {0x16fe4,0x1b155}, {0x1cc00,0x1cf46}, {0x1d2c0,0x1d2d3},
    {0x1df25,0x1df2a}, {0x1e030,0x1e5fa}, {0x1f16c,0x1f16c}, {0x1f6dc,0x1fbf9}, {0x2b739,0x2ee5d}, {0x31350,0x323af},
};

// Letters newer than utf8proc's, with the distance to their lowercase letter.
struct Lowercase {
  char32_t first, last;
  int distance;
};

inline constexpr Lowercase kLaterLowercase[] = {
    {0x1c89,0x1c89,1}, {0xa7cb,0xa7cb,-42343}, {0xa7cc,0xa7cc,1}, {0xa7ce,0xa7ce,1}, {0xa7d2,0xa7d2,1},
    {0xa7d4,0xa7d4,1}, {0xa7da,0xa7da,1}, {0xa7dc,0xa7dc,-42561}, {0x10d50,0x10d65,32}, {0x16ea0,0x16eb8,27},
};

}  // namespace streambp::unicode
