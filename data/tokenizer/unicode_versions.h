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
  {"Lu",
   R"(\x{1C89}\x{A7CB}-\x{A7CC}\x{A7DA}\x{A7DC}\x{10D50}-\x{10D65})"},
  {"Ll",
   R"(\x{1C8A}\x{A7CD}\x{A7DB}\x{10D70}-\x{10D85}\x{1DF25}-\x{1DF2A})"},
  {"Lt",""},
  {"Lm",
   R"(\x{10D4E}\x{10D6F}\x{16D40}-\x{16D42}\x{16D6B}-\x{16D6C}\x{1E030}-\x{1E06D}\x{1E4EB})"},
  {"Lo",
   R"(\x{105C0}-\x{105F3}\x{10D4A}-\x{10D4D}\x{10D4F}\x{10EC2}-\x{10EC4}\x{1123F}-\x{11240})"
   R"(\x{11380}-\x{11389}\x{1138B}\x{1138E}\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3})"
   R"(\x{11BC0}-\x{11BE0}\x{11F02}\x{11F04}-\x{11F10}\x{11F12}-\x{11F33}\x{1342F}\x{13441}-\x{13446})"
   R"(\x{13460}-\x{143FA}\x{16100}-\x{1611D}\x{16D43}-\x{16D6A}\x{18CFF}\x{1B132}\x{1B155})"
   R"(\x{1E4D0}-\x{1E4EA}\x{1E5D0}-\x{1E5ED}\x{1E5F0}\x{2B739}\x{2EBF0}-\x{2EE5D}\x{31350}-\x{323AF})"},
  {"Mn",
   R"(\x{897}\x{ECE}\x{10D69}-\x{10D6D}\x{10EFC}-\x{10EFF}\x{11241}\x{113BB}-\x{113C0}\x{113CE}\x{113D0})"
   R"(\x{113D2}\x{113E1}-\x{113E2}\x{11F00}-\x{11F01}\x{11F36}-\x{11F3A}\x{11F40}\x{11F42}\x{11F5A})"
   R"(\x{13440}\x{13447}-\x{13455}\x{1611E}-\x{16129}\x{1612D}-\x{1612F}\x{1E08F}\x{1E4EC}-\x{1E4EF})"
   R"(\x{1E5EE}-\x{1E5EF})"},
  {"Mc",
   R"(\x{CF3}\x{113B8}-\x{113BA}\x{113C2}\x{113C5}\x{113C7}-\x{113CA}\x{113CC}-\x{113CD}\x{113CF}\x{11F03})"
   R"(\x{11F34}-\x{11F35}\x{11F3E}-\x{11F3F}\x{11F41}\x{1612A}-\x{1612C})"},
  {"Me",""},
  {"Nd",
   R"(\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{11F50}-\x{11F59}\x{16130}-\x{16139})"
   R"(\x{16D70}-\x{16D79}\x{1CCF0}-\x{1CCF9}\x{1E4F0}-\x{1E4F9}\x{1E5F1}-\x{1E5FA})"},
  {"Nl",""},
  {"No",
   R"(\x{1D2C0}-\x{1D2D3})"},
  {"Pc",""},
  {"Pd",
   R"(\x{10D6E})"},
  {"Ps",""},
  {"Pe",""},
  {"Pi",""},
  {"Pf",""},
  {"Po",
   R"(\x{1B4E}-\x{1B4F}\x{1B7F}\x{113D4}-\x{113D5}\x{113D7}-\x{113D8}\x{11B00}-\x{11B09}\x{11BE1})"
   R"(\x{11F43}-\x{11F4F}\x{16D6D}-\x{16D6F}\x{1E5FF})"},
  {"Sm",
   R"(\x{10D8E}-\x{10D8F})"},
  {"Sc",""},
  {"Sk",""},
  {"So",
   R"(\x{2427}-\x{2429}\x{2FFC}-\x{2FFF}\x{31E4}-\x{31E5}\x{31EF}\x{1CC00}-\x{1CCEF}\x{1CD00}-\x{1CEB3})"
   R"(\x{1F6DC}\x{1F774}-\x{1F776}\x{1F77B}-\x{1F77F}\x{1F7D9}\x{1F8B2}-\x{1F8BB}\x{1F8C0}-\x{1F8C1})"
   R"(\x{1FA75}-\x{1FA77}\x{1FA87}-\x{1FA89}\x{1FA8F}\x{1FAAD}-\x{1FAAF}\x{1FABB}-\x{1FABF}\x{1FAC6})"
   R"(\x{1FACE}-\x{1FACF}\x{1FADA}-\x{1FADC}\x{1FADF}\x{1FAE8}-\x{1FAE9}\x{1FAF7}-\x{1FAF8})"
   R"(\x{1FBCB}-\x{1FBEF})"},
  {"Zs",""},
  {"Zl",""},
  {"Zp",""},
  {"Cc",""},
  {"Cf",
   R"(\x{13439}-\x{1343F})"},
  {"Co",""},
  {"Arabic",
   R"(\x{897}\x{10EC2}-\x{10EC4}\x{10EFC}-\x{10EFF})"},
  {"Cyrillic",
   R"(\x{1C89}-\x{1C8A}\x{1E030}-\x{1E06D}\x{1E08F})"},
  {"Devanagari",
   R"(\x{11B00}-\x{11B09})"},
  {"Greek",""},
  {"Han",
   R"(\x{2B739}\x{2EBF0}-\x{2EE5D}\x{31350}-\x{323AF})"},
  {"Hangul",""},
  {"Hebrew",""},
  {"Hiragana",
   R"(\x{1B132})"},
  {"Katakana",
   R"(\x{1B155})"},
  {"Latin",
   R"(\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{1DF25}-\x{1DF2A})"},
  {"Thai",""},
};

// Characters newer than the library's normal forms, which leave them as they are: those that other versions change.
struct Range {
  char32_t first, last;
};

inline constexpr Range kUnknown[] = {
    {0x7fd,0x7fd}, {0x897,0x89f}, {0x8ca,0x8d3}, {0x9fe,0x9fe}, {0xafa,0xaff}, {0xb55,0xb55}, {0xc04,0xc04},
    {0xc3c,0xc3c}, {0xcf3,0xcf3}, {0xd00,0xd00}, {0xd3b,0xd3c}, {0xd81,0xd81}, {0xeba,0xeba}, {0xece,0xece},
    {0x1715,0x1715}, {0x180f,0x180f}, {0x1abf,0x1ace}, {0x1c89,0x1c8a}, {0x1cf7,0x1cf7}, {0x1df6,0x1dfa},
    {0x2427,0x2429}, {0x2ffc,0x2fff}, {0x31e4,0x31e5}, {0x31ef,0x31ef}, {0x32ff,0x32ff}, {0xa7cb,0xa7cd},
    {0xa7da,0xa7dc}, {0xa7f2,0xa7f4}, {0xa82c,0xa82c}, {0xa8ff,0xa8ff}, {0xab69,0xab69}, {0x105c0,0x105f3},
    {0x10781,0x10785}, {0x10787,0x107b0}, {0x107b2,0x107ba}, {0x10d24,0x10d27}, {0x10d40,0x10d65}, {0x10d69,0x10d6d},
    {0x10d6f,0x10d85}, {0x10d8e,0x10d8f}, {0x10eab,0x10eac}, {0x10ec2,0x10ec4}, {0x10efc,0x10eff}, {0x10f46,0x10f50},
    {0x10f82,0x10f85}, {0x11070,0x11070}, {0x11073,0x11074}, {0x110c2,0x110c2}, {0x11145,0x11146}, {0x111c9,0x111c9},
    {0x111ce,0x111cf}, {0x1123f,0x11241}, {0x1133b,0x1133b}, {0x11380,0x11389}, {0x1138b,0x1138b}, {0x1138e,0x1138e},
    {0x11390,0x113b5}, {0x113b7,0x113c0}, {0x113c2,0x113c2}, {0x113c5,0x113c5}, {0x113c7,0x113ca}, {0x113cc,0x113d3},
    {0x113e1,0x113e2}, {0x1145e,0x1145e}, {0x116d0,0x116e3}, {0x1182c,0x1183a}, {0x11930,0x11935}, {0x11937,0x11938},
    {0x1193b,0x1193e}, {0x11940,0x11940}, {0x11942,0x11943}, {0x119d1,0x119d7}, {0x119da,0x119e0}, {0x119e4,0x119e4},
    {0x11a01,0x11a0a}, {0x11a33,0x11a39}, {0x11a3b,0x11a3e}, {0x11a47,0x11a47}, {0x11a51,0x11a5b}, {0x11a8a,0x11a99},
    {0x11bc0,0x11be0}, {0x11bf0,0x11bf9}, {0x11d31,0x11d36}, {0x11d3a,0x11d3a}, {0x11d3c,0x11d3d}, {0x11d3f,0x11d45},
    {0x11d47,0x11d47}, {0x11d8a,0x11d8e}, {0x11d90,0x11d91}, {0x11d93,0x11d97}, {0x11ef3,0x11ef6}, {0x11f00,0x11f10},
    {0x11f12,0x11f3a}, {0x11f3e,0x11f42}, {0x11f50,0x11f5a}, {0x1342f,0x1342f}, {0x13440,0x13455}, {0x13460,0x143fa},
    {0x16100,0x16139}, {0x16d40,0x16d6c}, {0x16d70,0x16d79}, {0x16f4f,0x16f4f}, {0x16f7f,0x16f87}, {0x16fe4,0x16fe4},
    {0x16ff0,0x16ff1}, {0x18cff,0x18cff}, {0x1b132,0x1b132}, {0x1b155,0x1b155}, {0x1cc00,0x1ccf9}, {0x1cd00,0x1ceb3},
    {0x1cf00,0x1cf2d}, {0x1cf30,0x1cf46}, {0x1d2c0,0x1d2d3}, {0x1df25,0x1df2a}, {0x1e030,0x1e06d}, {0x1e08f,0x1e08f},
    {0x1e130,0x1e136}, {0x1e2ae,0x1e2ae}, {0x1e2ec,0x1e2ef}, {0x1e4d0,0x1e4f9}, {0x1e5d0,0x1e5fa}, {0x1f16c,0x1f16c},
    {0x1f6dc,0x1f6dc}, {0x1f774,0x1f776}, {0x1f77b,0x1f77f}, {0x1f7d9,0x1f7d9}, {0x1f8b2,0x1f8bb}, {0x1f8c0,0x1f8c1},
    {0x1fa75,0x1fa77}, {0x1fa87,0x1fa89}, {0x1fa8f,0x1fa8f}, {0x1faad,0x1faaf}, {0x1fabb,0x1fabf}, {0x1fac6,0x1fac6},
    {0x1face,0x1facf}, {0x1fada,0x1fadc}, {0x1fadf,0x1fadf}, {0x1fae8,0x1fae9}, {0x1faf7,0x1faf8}, {0x1fbcb,0x1fbf9},
    {0x2b739,0x2b739}, {0x2ebf0,0x2ee5d}, {0x31350,0x323af},
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
