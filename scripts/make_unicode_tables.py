#!/usr/bin/env python3
"""Writes data/tokenizer/unicode_tables.cuh: what tokenizers need of Unicode's database, as the `tokenizers` library knows it.

A model was trained on what the library made of its text, so the library decides. Its normaliser is of an earlier
version of Unicode than its regular expressions, and those are later than PCRE2's. So this takes the database of Python
(its version 14, that of PCRE2 10.42), and asks the library about every character: what its normaliser does not know is
left out of the normal forms, and what its expressions know beyond the database is listed as `kLater`. At the end
normalising by the tables is set beside the library on millions of random strings.

Needs Python 3.11, whose database is of version 14, and: pip install tokenizers      (0.23.3 made the file)
"""

import random
import unicodedata
from itertools import groupby
from pathlib import Path

from tokenizers import Regex, normalizers, pre_tokenizers

OUT = Path(__file__).resolve().parent.parent / "data" / "tokenizer" / "unicode_tables.cuh"
CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
NFC, NFD = normalizers.NFC(), normalizers.NFD()


def canonical(code):
    """The one or two characters that this one is composed of, as the library has it; none for most."""
    text = unicodedata.decomposition(chr(code))
    if not text or text.startswith("<") or NFD.normalize_str(chr(code)) == chr(code):
        return []
    return [int(part, 16) for part in text.split()]


def combining_class(code):
    """0 too if the library does not know the mark, and so does not put it before or after others."""
    known = unicodedata.combining(chr(code))
    if not known:
        return 0
    other = "\u0334" if known > 1 else "\u0301"  # classes 1 and 230
    pair = chr(code) + other if known > 1 else other + chr(code)
    return known if NFD.normalize_str("a" + pair) != "a" + pair else 0


def matches(expression):
    """All characters that the library's regular expressions take for one of this kind."""
    rest = pre_tokenizers.Split(Regex(expression), "removed").pre_tokenize_str("".join(map(chr, CODES)))
    missing = {ord(c) for part, _ in rest for c in part}
    return [c for c in CODES if c not in missing]


def ranges(codes):
    for _, run in groupby(enumerate(codes), lambda pair: pair[1] - pair[0]):
        run = [code for _, code in run]
        yield run[0], run[-1]


def later(kind):
    return ranges([c for c in matches(rf"\p{{{kind}}}") if unicodedata.category(chr(c)) == "Cn"])


def check(decompositions, classes):
    """Normalises by the tables, and compares with the library."""
    pairs = {(a, b): code for code, a, b, composes in decompositions if composes}
    parts = {code: (a, b) for code, a, b, _ in decompositions}

    def decompose(code):
        if 0xAC00 <= code < 0xAC00 + 11172:
            s = code - 0xAC00
            return [0x1100 + s // 588, 0x1161 + s // 28 % 21] + ([0x11A7 + s % 28] if s % 28 else [])
        if code not in parts:
            return [code]
        a, b = parts[code]
        return decompose(a) + ([b] if b else [])

    def nfd(text):
        out, run = [], []
        for c in [d for c in text for d in decompose(ord(c))] + [0]:
            if classes.get(c, 0):
                run.append(c)
            else:
                out += sorted(run, key=classes.get) + [c]
                run = []
        return out[:-1]

    def joined(a, b):
        if 0x1100 <= a < 0x1113 and 0x1161 <= b < 0x1176:
            return 0xAC00 + ((a - 0x1100) * 21 + b - 0x1161) * 28
        if 0xAC00 <= a < 0xAC00 + 11172 and (a - 0xAC00) % 28 == 0 and 0x11A7 < b < 0x11C3:
            return a + b - 0x11A7
        return pairs.get((a, b))

    def nfc(text):
        out, starter, before = [], None, -1
        for c in nfd(text):
            own = classes.get(c, 0)
            if starter is not None and before < own and (whole := joined(out[starter], c)):
                out[starter] = whole
                continue
            if own == 0:
                starter = len(out)
            before = own or -1
            out.append(c)
        return out

    rng = random.Random(1)
    marks = sorted(classes) + [c for c in CODES if unicodedata.category(chr(c))[0] == "M"]
    special = sorted(parts) + [p for pair in parts.values() for p in pair if p] + list(range(0x1100, 0x1200))
    pool = marks + special
    texts = ["a" + chr(c) + chr(m) + chr(c) for c in CODES for m in (0x334, 0x301, 0x323)]
    texts += ["".join(chr(rng.choice(pool)) for _ in range(rng.randint(1, 8))) for _ in range(1000000)]
    for text in texts:
        assert NFD.normalize_str(text) == "".join(map(chr, nfd(text))), ascii(text)
        assert NFC.normalize_str(text) == "".join(map(chr, nfc(text))), ascii(text)


def rows(items, width=120):
    lines, line = [], "   "
    for item in items:
        if len(line) + 1 + len(item) + 1 > width:
            lines.append(line)
            line = "   "
        line += " " + item + ","
    return "\n".join(lines + [line])


def literal(ranges):
    """A string of ranges, in lines."""
    lines, line = [], ""
    for first, last in ranges:
        part = f"\\x{{{first:X}}}" if first == last else f"\\x{{{first:X}}}-\\x{{{last:X}}}"
        if len(line + part) > 100:
            lines.append(line)
            line = ""
        line += part
    lines.append(line)
    return "".join(f'\n   R"({line})"' for line in lines) if line else '""'


def main():
    assert unicodedata.unidata_version.startswith("14."), "needs a Python whose Unicode database is of version 14"
    decompositions = []
    for code in CODES:
        parts = canonical(code)
        if parts and not 0xAC00 <= code < 0xAC00 + 11172:
            composes = NFC.normalize_str("".join(map(chr, parts))) == chr(code)
            decompositions.append((code, *parts, composes) if len(parts) == 2 else (code, *parts, 0, False))
    classes = {c: k for c in CODES if (k := combining_class(c))}
    check(decompositions, classes)
    combining = [(first, last, classes[first]) for k in sorted(set(classes.values()))
                 for first, last in ranges([c for c in classes if classes[c] == k])]
    categories = "L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp Cc Cf Co"
    scripts = "Arabic Cyrillic Devanagari Greek Han Hangul Hebrew Hiragana Katakana Latin Thai"
    kinds = [*categories.split(), *scripts.split()]
    OUT.write_text(f"""\
// Tables of Unicode, as the tokenizers library knows it: written by scripts/make_unicode_tables.py, which says how.
// clang-format off
#pragma once

#include <string_view>

namespace streambp::unicode {{

struct Decomposition {{
  char32_t code, first, second;  // no second: 0
  bool composes;                 // NFC puts the two together again
}};

inline constexpr Decomposition kDecompositions[] = {{
{rows(f"{{{code:#x},{a:#x},{b:#x},{int(composes)}}}" for code, a, b, composes in decompositions)}
}};

struct CombiningRange {{
  char32_t first, last;
  unsigned char combining_class;
}};

inline constexpr CombiningRange kCombining[] = {{
{rows(f"{{{first:#x},{last:#x},{k}}}" for first, last, k in sorted(combining))}
}};

// The properties that a regular expression may name: general categories and scripts, each with the characters
// that came after version 14 of Unicode, as ranges in a regular expression.
struct Later {{
  std::string_view kind, ranges;
}};

inline constexpr Later kLater[] = {{
""" + "".join(
        f'  {{"{kind}",{literal(later(kind))}}},\n'
        for kind in kinds) + """\
};

}  // namespace streambp::unicode
""")


if __name__ == "__main__":
    main()
