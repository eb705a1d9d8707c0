#!/usr/bin/env python3
"""Writes text/tokenizer/unicode_versions.h: where the `tokenizers` library and our libraries know different versions
of Unicode.

A model was trained on the library's tokens, so the library decides. Its regular expressions know Unicode 16, PCRE2 10.42
knows 14. Its normal forms know Unicode 9, utf8proc 2.8 knows 15. Its lowercase knows 17. This script asks the
libraries about every character and writes the differences.

Needs Python 3.11 (its Unicode database has version 14, like PCRE2's), libutf8proc2, and: pip install tokenizers==0.23.3
"""

import ctypes
import unicodedata
from itertools import groupby
from pathlib import Path

from tokenizers import Regex, normalizers, pre_tokenizers

OUT = Path(__file__).resolve().parent.parent / "text" / "tokenizer" / "unicode_versions.h"
CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()
SCRIPTS = "Arabic Cyrillic Devanagari Greek Han Hangul Hebrew Hiragana Katakana Latin Thai".split()
NFD, NFKD = normalizers.NFD(), normalizers.NFKD()
STABLE, COMPAT, DECOMPOSE = 2, 4, 16  # options of utf8proc

utf8proc = ctypes.CDLL("libutf8proc.so.2")
utf8proc.utf8proc_map.restype = ctypes.c_ssize_t
utf8proc.utf8proc_map.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int]


def decomposed(text):
    """NFKD by utf8proc."""
    data, out = text.encode(), ctypes.c_char_p()
    size = utf8proc.utf8proc_map(data, len(data), ctypes.byref(out), STABLE | COMPAT | DECOMPOSE)
    return ctypes.string_at(out, size).decode()


def ranges(codes):
    for _, run in groupby(enumerate(codes), lambda pair: pair[1] - pair[0]):
        run = [code for _, code in run]
        yield run[0], run[-1]


def matches(expression):
    """The characters that the library's regular expression matches."""
    rest = pre_tokenizers.Split(Regex(expression), "removed").pre_tokenize_str("".join(map(chr, CODES)))
    missing = {ord(c) for part, _ in rest for c in part}
    return [c for c in CODES if c not in missing]


def later(kind):
    return ranges([c for c in matches(rf"\p{{{kind}}}") if unicodedata.category(chr(c)) == "Cn"])


def inert(code):
    """True if the library's normal forms neither change nor reorder this character."""
    texts = [chr(code), chr(code) + "\u0334", "\u0301" + chr(code) + "\u0334"]  # marks of classes 1 and 230
    return all(NFKD.normalize_str(text) == text for text in texts)


def unknown():
    """What the library's normal forms do not know: marks, characters with a decomposition or a combining class, and all
    that is newer than Unicode 14, for later versions of utf8proc."""
    marks = set(matches(r"\p{M}")) - {c for c in CODES if normalizers.StripAccents().normalize_str(chr(c)) == ""}
    changed = {c for c in CODES
               if any(decomposed(text) != NFKD.normalize_str(text) for text in (chr(c), chr(c) + "\u0334", "\u0301" + chr(c) + "\u0334"))}
    new = {c for c in matches(r"[\p{L}\p{M}\p{N}\p{S}]") if unicodedata.category(chr(c)) == "Cn"}
    found = marks | changed | new
    assert all(map(inert, found))
    return joined(list(ranges(sorted(found))))


def joined(found):
    """The ranges, with those joined between which no normal form changes or composes any character."""
    composed = {c for code in CODES for c in unicodedata.decomposition(chr(code)).split() if not c.startswith("<")}
    quiet = {c for c in CODES if f"{c:04X}" not in composed and inert(c) and decomposed(chr(c)) == chr(c)
             and unicodedata.category(chr(c))[0] != "M"}
    begin, last = found[0]
    for first, end in found[1:]:
        if not all(c in quiet for c in range(last + 1, first)):
            yield begin, last
            begin = first
        last = end
    yield begin, last


def lowercase():
    """(first, last, distance) of letters with a lowercase letter that utf8proc does not know; U+0130 has two letters."""
    lower = {}
    for c in CODES:
        text = normalizers.Lowercase().normalize_str(chr(c))
        if c != 0x130 and text != chr(utf8proc.utf8proc_tolower(c)):
            assert len(text) == 1
            lower[c] = ord(text) - c
    for first, last in ranges(sorted(lower)):
        for distance, run in groupby(range(first, last + 1), lower.get):
            run = list(run)
            yield run[0], run[-1], distance


def rows(items, width=120):
    lines, line = [], "   "
    for item in items:
        if len(line) + 1 + len(item) + 1 > width:
            lines.append(line)
            line = "   "
        line += " " + item + ","
    return "\n".join(lines + [line])


def literal(ranges):
    """The ranges as a string of several lines."""
    lines, line = [], ""
    for first, last in ranges:
        part = f"\\x{{{first:X}}}" if first == last else f"\\x{{{first:X}}}-\\x{{{last:X}}}"
        if len(line + part) > 108:
            lines.append(line)
            line = ""
        line += part
    lines.append(line)
    return "\n     ".join(f'R"({line})"' for line in lines) if line else '""'


def table(kinds):
    """A row for each kind that has new characters, and then those that have none."""
    entries = [f'{{"{kind}", {literal(later(kind))}}}' for kind in kinds]
    empty = [entry for entry in entries if entry.endswith('""}')]
    return "\n".join(f"    {entry}," for entry in entries if entry not in empty) + "\n" + rows(empty)


def main():
    assert unicodedata.unidata_version.startswith("14."), "needs a Python with a Unicode 14 database"
    OUT.write_text(f"""\
// Where the `tokenizers` library and ours know different versions of Unicode. Written by
// scripts/make_unicode_versions.py.
// clang-format off
#pragma once

#include <string_view>

namespace streambp::unicode {{

// General categories and scripts, each with the characters that are newer than PCRE2's Unicode 14, as ranges of a
// regular expression.
struct Later {{
  std::string_view kind, ranges;
}};

inline constexpr Later kLater[] = {{
{table(CATEGORIES + SCRIPTS)}
}};

// Characters newer than the library's normal forms, which leave them as they are: those that other versions change, and
// neighbours that no version changes.
struct Range {{
  char32_t first, last;
}};

inline constexpr Range kUnknown[] = {{
{rows(f"{{{first:#x},{last:#x}}}" for first, last in unknown())}
}};

// Letters newer than utf8proc's, with the distance to their lowercase letter.
struct Lowercase {{
  char32_t first, last;
  int distance;
}};

inline constexpr Lowercase kLaterLowercase[] = {{
{rows(f"{{{first:#x},{last:#x},{distance}}}" for first, last, distance in lowercase())}
}};

}}  // namespace streambp::unicode
""")


if __name__ == "__main__":
    main()
