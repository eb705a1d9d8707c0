#!/usr/bin/env python3
"""Writes tests/golden/tokenizers: the results of the `tokenizers` library.

Each layout is a small vocabulary in the form of a family of published tokenizers, trained here on a few sentences in
many scripts:

  texts.json               {"texts": [hex of the bytes], "pieces": [hex]: the parts of random texts}
  LAYOUT.tokenizer.json    the tokenizer
  LAYOUT.json              its results:
    prefix, suffix, size
    texts    [[ids, ids with special tokens as ordinary text, decoded, decoded without special tokens]] for every text.
             null: the same ids, the text itself, the same decoded text.
    random   [hash]: ids and decoded texts, all four, of 200 random texts from each of the seeds 0, 1, ...; the tests
             draw the same texts
  normalizers.json         {normalizer: [hash]}: of every character between marks, one hash per block of BLOCK

Needs: pip install tokenizers==0.23.3
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "tokenizers"

SENTENCES = """\
The gradient of a long sequence is the sum of many small pieces, and each of them can be computed by itself.
She said that they'd better wait; we've seen it's raining, I'm sure you'll agree he'd rather not. THEY'LL SEE.
In 1984 there were 12345 of them, then 3.14159 times as many: 7 8 9 10 11 12 2024 2025 1000000.
def backward(self, x):\n    for i in range(len(x)):\n        if x[i] > 0:\n            return x[i] * 2.0  # twice\n    return None
int main(int argc, char** argv) {\n\tprintf("hello, world\\n");\n\treturn 0;\n}
Die Straße führt über die große Brücke zum Fluß; die Mädchen hören Vögel. Äpfel, Öl, Übung.
L'été dernier, j'ai mangé une crème brûlée à côté du château; ça m'a plu, où êtes-vous?
El niño pequeño comió piñas en la montaña. ¿Dónde está? ¡Aquí!
Příliš žluťoučký kůň úpěl ďábelské ódy. Zażółć gęślą jaźń.
Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.
Η γρήγορη αλεπού πηδά πάνω από το τεμπέλικο σκυλί. Τι ώρα είναι;
השמש זורחת מעל הים, והילדים משחקים בחול. שָׁלוֹם
الشمس مشرقة فوق البحر والأطفال يلعبون في الرمال. مُحَمَّد
सूरज समुद्र के ऊपर चमक रहा है और बच्चे रेत में खेल रहे हैं।
แสงแดดส่องลงมาบนทะเล และเด็ก ๆ กำลังเล่นทราย
太阳照在海面上,孩子们在沙滩上玩耍。这是一个很长的句子。
太陽が海の上に輝いて、子供たちは砂浜で遊んでいます。カタカナ
해가 바다 위에 빛나고 아이들은 모래사장에서 놀고 있습니다. 안녕하세요
Tiếng Việt có nhiều dấu thanh: ngữ, nghĩa, được, những, người.
Emoji: 😀 😃 🎉 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️ and signs → ≤ ≥ ∑ √ © ® ™ € £ ¥.
Spaces  of   several    widths\u00a0and\u2003kinds\u3000here,\ttabs\t\ttoo,\r\nand line\n\n\nbreaks.
"""

AWKWARD = [
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", " \n \n ", "\u00a0", "\u2003\u2003", "\u3000a", "\u180e", "a\u180e b",
    "\u200b", "\u200d", "\ufeff", "\x00", "\x00\x00a\x00", "\x01\x02\x1b[0m", "\x7f\x80\x85\x9f", "\ufffd", "\ufffe\uffff", "\U0010ffff",
    "a", "A", " a", "a ", " a ", "  a  ", "a  b", "a   b    c", "a\nb", "a\n\nb", "a \n b", "a\r\n\r\nb", "a\tb", "\ta", "a\n", "a\n\n\n",
    "Hello, world!", "hello", " hello", "hello hello", "Hello world, it's me; they'll've said I'd 'd 'S 'T 'Ll 'VE 'rE",
    "'ſ 'ſa 'K x'ſ x'S it'ſ", "don't DON'T can’t", "'''", "''s", "s's's", "1", "12", "123", "1234", "12345", "1234567890", "1 22 333 4444",
    "3.14", "1,000,000", "x1y2z3", "²³¹¼½¾", "٣٤٥ ௧௨ Ⅷ ⅷ ㊿", "a1b22c333d4444", "0x1F600", "...", "?!?!", "a.b.c", "--- ---", "<<<>>>", "{}[]()",
    "$%^&*", "C:\\dir\\file", "http://example.org/a?b=c&d=e#f", "user@example.org", "#include <x.h>", "x+=1;\n\ty--;", "    indented\n        more",
    "e\u0301", "\u00e9", "a\u0301\u0323", "a\u0323\u0301", "q\u0307\u0323", "\u1e9b\u0323", "\u212b\u2126\u212a", "\u0958\u09dc\u0a33", "\u0344\u0387\u1fbe",
    "\u1112\u1161\u11ab\u1100\u1173\u11af", "\ud55c\uae00", "\uac00\u11a8", "\u1100\u1161", "\u0f73\u0f75\u0f81", "\u2adc", "\U0001d15e\U0001d157\U0001d165",
    "\uf900\uf901\U0002f800", "a" + "\u0300\u0316\u0301\u0317" * 20, "\u0327c\u0301", "Å\u0327", "\u00c7\u0301", "\u1e69\u0307", "\u0b47\u0b56", "\ufb01\ufb2a",
    "ñandú ÑANDÚ", "Straße STRASSE", "İstanbul ıI", "ǆ ǅ Ǆ", "ﬁ ﬂ ﬀ", "ŉ", "ªº", "𝒜𝓑𝔠", "ｆｕｌｌ　ｗｉｄｔｈ", "日本語テキスト", "中文。标点，符号！", "한국어 텍스트",
    "ภาษาไทย", "हिन्दी में", "தமிழ்", "עברית שָׁלוֹם", "العربية مُحَمَّد", "Ελληνικά", "Кириллица", "ქართული", "Հայերեն", "አማርኛ", "ខ្មែរ", "မြန်မာ", "བོད་ཡིག",
    "😀", "😀😀😀", " 😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🇩🇪🇫🇷", "❤️", "☕︎", "a😀b", "\u202eabc\u202c", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞",
    "\U0001e030\U00011f04a", "\U000105c0\U00031350x \U0001e4f0", "\U00010d40\U00016d70", "\u1c89\u0897\u1b4e\U0001fadc", "\U00011de0\U00016ff4", "▁", "▁▁", "▁a", " ▁", "▁ a", "a▁b", "Ġ", "Ġa ĠĊ", "Ċ", "ĀāĂ", "<0x41>", "<0x0A><0xFF>", "<0x>",
    "aaaa" * 30, "ab" * 60, " " * 100, "\n" * 60, "\t \t " * 20, "é" * 60, "0123456789" * 6, "!?" * 40, "abcdefghijklmnopqrstuvwxyz" * 2,
    "the" * 40, "The quick brown fox jumps over the lazy dog. " * 3, " the the  the   the", "😀" * 20, "한" * 25, "a\u0301" * 30, "▁" * 70,
    "<|im_start|>", "<|im_start|>user\nHi<|im_end|>\n", "a<|im_start|>b", " <|im_start|> ", "<|im_start|><|im_start|>", "<|im_start", "<|im_start|", "|im_start|>",
    "<|im_<|im_start|>", "<s>", "</s>", "<s>Hello</s>", "<s> Hello </s>", " <s>", "<unk>", "<unk><unk>x", "[LEFT]", "a  [LEFT]  b", "a \n[LEFT]\n b", "[RIGHT]",
    "a  [RIGHT]  b", "[RIGHT] \u3000\n[RIGHT]x", "  [BOTH]  ", "a\t[BOTH]\t\tb", "[BOTH] [BOTH]", "[LEFT] [RIGHT] [LEFT]", "[RIGHT] [LEFT]", "word", "a word b",
    "aword", "words", "word word", "(word)", "word's", "é word", "éword", "word1", "1word", "_word", "word_", "-word-", "word\u0301", "\u200dword", "²word", "ⓐword", "\u2160word", "中word",
    "NORM", "a NORM b", "aNORMb", "  NORM  ", "NoRM", "caf\u00e9", "cafe\u0301", "un cafe\u0301!", "a b c", "x a b c y", "a  b c", "ab", "abc", "abcd", "xabcdx", "abcabcd",
    "SPECIALNORM", "x SPECIALNORM y", "longer longest long", "longlonger", "longest", "longes", "   ", "x   y", "x\n\ny", "    ", "     ",
    "<|im_start|>word<|im_end|>", "word<|im_start|>word", "[LEFT]word[RIGHT]", "[BOTH]NORM[BOTH]",
]
INVALID = [
    b"\xff", b"\xfe\xff", b"a\xffb", b"\x80", b"\xbf\xbf", b"\xc0\x80", b"\xc1\xbf", b"\xc2", b"\xc2a", b"\xe0\x80\x80", b"\xe0\xa0", b"\xe0\xa0a",
    b"\xe2\x82", b"\xe2\x82\xac\xe2\x82", b"\xe2\x28\xa1", b"\xed\xa0\x80", b"\xed\xa0\x80\xed\xb0\x80", b"\xed\x9f\xbf", b"\xee\x80\x80", b"\xf0\x80\x80\x80",
    b"\xf0\x9f\x98", b"\xf0\x9f\x98a", b"\xf0\x9f", b"\xf0\x9f\xf0\x9f\x98\x80", b"\xf0", b"\xf4\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xf8\x88\x80\x80\x80",
    b"abc\xe4def", b"\xef\xbb\xbfx", b"<|im_start|>\xff<|im_end|>", b"[LEFT]\xff [RIGHT]", b"word\xff", b"\xc3\xa9\xc3", b" \xff \xff", b"\xff\n\n\xff",
]
PIECES = [
    " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "a", "e", "the", "The", " the", "ing", "tion", "word", "'s", "'LL", "1", "23", "456", ".", ",", "!?", "-", "_", "▁", "Ġ",
    "é", "e\u0301", "\u0323", "\u0327", "ß", "я", "при", "ω", "ש", "م", "ह", "ก", "中", "日本", "한", "\u1112", "\u1161", "\u11ab", "😀", "\u200d", "🏽", "\u00a0", "\u3000", "\u180e", "\u2028",
    "\x00", "\x1b", "\u0085", "²", "Ⅷ", "\ufffd", "\U00031350", "\U0001e4f0", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "[LEFT]", "[RIGHT]", "[BOTH]", "NORM", "caf\u00e9",
    "abc", "abcd", "long", "longer", "SPECIALNORM", "<0x41>", "{", "}", "#", "(", "\U0002f800",
]
PIECES = [piece.encode() for piece in PIECES] + [b"\xff", b"\xe2\x82", b"\xf0\x9f", b"\x80"]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN3_5 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
O200K = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
DEEPSEEK = [r"\p{N}{1,3}", r"[一-龥\u3040-ゟ゠-ヿ]+".replace(r"\u3040", "\u3040"),
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]


def frequent(count):
    """The sentences without rare characters. (The trainer's limit_alphabet breaks ties at random.)"""
    kept = sorted(set(SENTENCES), key=lambda c: (-SENTENCES.count(c), c))[:count]
    return "".join(c for c in SENTENCES if c in kept)


def byte_level(pre_tokenizer, normalizer=None, size=600, texts=(SENTENCES,), **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def fallback(normalizer=None, pre_tokenizer=None, decoder=None, train=None, size=650, texts=None,
             special=("<unk>", "<s>", "</s>"), **model):
    """Characters, with tokens <0x00> to <0xFF> for those outside the vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True, **model))
    if normalizer:
        tokenizer.normalizer = normalizer
    if train:
        tokenizer.pre_tokenizer = train
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False,
        special_tokens=[*special, *(f"<0x{b:02X}>" for b in range(256))])
    tokenizer.train_from_iterator(texts or [frequent(150)], trainer)
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = [t for t in settings["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    return tokenizer


def sequence(module, *parts):
    return module.Sequence(list(parts))


def split(pattern, behavior="isolated", **options):
    return pre_tokenizers.Split(Regex(pattern), behavior, **options)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
UNDERSCORE = decoders.Replace("▁", " ")


def add_every_kind(tokenizer):
    tokenizer.add_tokens([
        AddedToken("<|im_start|>", special=True, normalized=False), AddedToken("<|im_end|>", special=True, normalized=False),
        AddedToken("[LEFT]", lstrip=True, special=True, normalized=False), AddedToken("[RIGHT]", rstrip=True, normalized=False),
        AddedToken("[BOTH]", lstrip=True, rstrip=True, normalized=True), AddedToken("word", single_word=True, normalized=False),
        AddedToken("NORM", normalized=True), AddedToken("cafe\u0301", normalized=True), AddedToken("a b c", normalized=False),
        AddedToken("abc", normalized=False), AddedToken("abcd", special=True, normalized=False), AddedToken("SPECIALNORM", special=True, normalized=True),
        AddedToken("long", normalized=False), AddedToken("longest", normalized=False), AddedToken("   ", normalized=False), AddedToken("\n\n", normalized=False),
    ])
    return tokenizer


def template(tokenizer, single):
    names = [name for name in single.split() if not name.startswith("$")]
    return processors.TemplateProcessing(single=single, special_tokens=[(n, tokenizer.token_to_id(n)) for n in set(names)])


def layouts():
    gpt2 = add_every_kind(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)))
    gpt2.post_processor = processors.ByteLevel(trim_offsets=False)
    yield "gpt2", gpt2, {}

    yield "gpt2_prefix_space", byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), size=500), {"legacy_merges": True}

    llama3 = add_every_kind(byte_level(sequence(pre_tokenizers, split(LLAMA3), BYTES), ignore_merges=True))
    llama3.post_processor = processors.Sequence([processors.ByteLevel(), template(llama3, "<|im_start|> $A")])
    yield "llama3", llama3, {}

    yield "qwen2", add_every_kind(byte_level(sequence(pre_tokenizers, split(QWEN2), BYTES), normalizers.NFC())), {}

    yield "qwen3_5", byte_level(sequence(pre_tokenizers, split(QWEN3_5), BYTES), normalizers.NFC(), size=500), {}

    o200k = byte_level(sequence(pre_tokenizers, split(O200K, "removed", invert=True), BYTES), size=500)
    yield "o200k", o200k, {}

    deepseek = sequence(pre_tokenizers, *[split(p) for p in DEEPSEEK], pre_tokenizers.Digits(individual_digits=True), BYTES)
    yield "deepseek", byte_level(deepseek, normalizers.NFD(), size=500), {}

    legacy = sequence(decoders, UNDERSCORE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    llama2 = add_every_kind(fallback(sequence(normalizers, normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")), decoder=legacy,
                                     train=pre_tokenizers.Split("▁", "merged_with_next")))
    llama2.post_processor = template(llama2, "<s> $A </s>")
    yield "llama2", llama2, {"legacy_merges": True}

    mistral = fallback(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False), train=pre_tokenizers.Metaspace(),
                       decoder=sequence(decoders, UNDERSCORE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)))
    mistral = add_every_kind(mistral)
    mistral.post_processor = template(mistral, "<s> $A")
    yield "mistral", mistral, {}

    gemma = fallback(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"),
                     sequence(decoders, UNDERSCORE, decoders.ByteFallback(), decoders.Fuse()), train=pre_tokenizers.Split("▁", "merged_with_next"))
    yield "gemma", add_every_kind(gemma), {}

    # No byte tokens, several unknown tokens in a row, old names of fields, added tokens after Strip and Replace.
    unknown = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False))
    unknown.normalizer = sequence(normalizers, normalizers.Strip(), normalizers.Replace(Regex(r"\s{2,}|\p{Han}"), " "), normalizers.NFC())
    unknown.pre_tokenizer = sequence(pre_tokenizers, pre_tokenizers.Metaspace(), split(r"[aeiou]+", "contiguous"), split(r"[.,;!?]", "merged_with_previous"),
                                     split(r"[A-Z]", "merged_with_next"), pre_tokenizers.Digits(individual_digits=False))
    unknown.decoder = decoders.Metaspace()
    unknown.train_from_iterator([frequent(80)], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False))
    yield "unknown", add_every_kind(unknown), {"old_metaspace": True}

    # Every normalizer that changes letters. Added tokens are matched in the changed text.
    compatible = sequence(normalizers, normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(" ", "▁"))
    yield "nfkc", add_every_kind(fallback(compatible, decoder=sequence(decoders, UNDERSCORE, decoders.ByteFallback(), decoders.Fuse()),
                                          train=pre_tokenizers.Split("▁", "merged_with_next"), size=500)), {}

    uncased = sequence(normalizers, normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Strip(left=False))
    yield "uncased", add_every_kind(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), uncased, size=400)), {}

    # No unknown token, so characters outside the vocabulary vanish; no decoder.
    bare = Tokenizer(models.BPE())
    bare.train_from_iterator([frequent(90)], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    yield "bare", bare, {}


def saved(tokenizer, legacy_merges=False, old_metaspace=False):
    settings = json.loads(tokenizer.to_str())
    if legacy_merges:
        settings["model"]["merges"] = [" ".join(pair) for pair in settings["model"]["merges"]]
    if old_metaspace:
        for holder in [settings["pre_tokenizer"]["pretokenizers"][0], settings["decoder"]]:
            assert holder.pop("prepend_scheme") == "always"
            holder["add_prefix_space"] = True
            holder["str_rep"] = holder["replacement"]
    return json.dumps(settings, ensure_ascii=False, separators=(",", ":"))


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
    return x ^ (x >> 31)


class Draw:
    """The random numbers of kernels/base/random.h in order."""

    def __init__(self, seed):
        self.key, self.index = mix(mix(seed)), -1

    def below(self, n):
        self.index += 1
        return mix(self.key ^ mix(self.index)) % n


def random_text(draw):
    """A sequence of pieces, of bytes, or of code points."""
    kind, count = draw.below(4), draw.below(24)
    if kind < 2:
        return b"".join(PIECES[draw.below(len(PIECES))] for _ in range(count))
    if kind == 2:
        return bytes(draw.below(256) for _ in range(count))
    limits = [0x80, 0x250, 0x800, 0x3000, 0x10000, 0x110000]
    return b"".join(chr(draw.below(limits[draw.below(6)])).encode("utf-8", "surrogatepass") for _ in range(count))


class Hash:
    """FNV-1a"""

    def __init__(self):
        self.value = 0xCBF29CE484222325

    def add(self, data):
        for byte in data:
            self.value = (self.value ^ byte) * 0x100000001B3 & (2**64 - 1)


def results(tokenizer, data):
    text = data.decode("utf-8", "replace")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer.encode_special_tokens = True
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer.encode_special_tokens = False
    return text, ids, plain, tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids, skip_special_tokens=True)


BLOCK = 0x2000


def normalizer_hashes(normalizer):
    hashes = []
    for begin in [*range(0, 0x20000, BLOCK), 0x2F000]:
        digest = Hash()
        for code in range(begin, begin + BLOCK):
            if not 0xD800 <= code < 0xE000:
                digest.add(normalizer.normalize_str("\u0301" + chr(code) + "\u0334" + chr(code) + "\u0301").encode() + b"\xff")
        hashes.append(str(digest.value))
    return hashes


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    kinds = [normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD(), normalizers.Lowercase(), normalizers.StripAccents()]
    save("normalizers", {type(kind).__name__: normalizer_hashes(kind) for kind in kinds})
    texts = [text.encode("utf-8", "surrogatepass") for text in [*AWKWARD, SENTENCES]] + INVALID
    save("texts", {"texts": [text.hex() for text in texts], "pieces": [piece.hex() for piece in PIECES]})
    for name, tokenizer, options in layouts():
        definition = saved(tokenizer, **options)
        (OUT / f"{name}.tokenizer.json").write_text(definition)
        tokenizer = Tokenizer.from_str(definition)
        rows = []
        for data in texts:
            text, ids, plain, decoded, skipped = results(tokenizer, data)
            rows.append([ids, None if plain == ids else plain, None if decoded == text else decoded, None if skipped == decoded else skipped])
        hashes = []
        for seed in range(20):
            draw, digest = Draw(seed), Hash()
            for _ in range(200):
                _, ids, plain, decoded, skipped = results(tokenizer, random_text(draw))
                for tokens in (ids, plain):
                    digest.add(b"".join(token.to_bytes(4, "little") for token in tokens) + b"\xff" * 4)
                for text in (decoded, skipped):
                    digest.add(text.encode() + b"\xff")
            hashes.append(str(digest.value))
        special = tokenizer.encode("", add_special_tokens=True).ids
        whole = tokenizer.encode("a", add_special_tokens=True).ids
        inner = tokenizer.encode("a", add_special_tokens=False).ids
        before = next(i for i in range(len(whole)) if whole[i:i + len(inner)] == inner)
        save(name, {"prefix": special[:before], "suffix": special[before:], "size": max(tokenizer.get_vocab().values()) + 1,
                    "random": hashes, "texts": rows})


def save(name, cases):
    text = json.dumps(cases, ensure_ascii=False, separators=(",", ":")).replace("],[", "],\n[")
    (OUT / f"{name}.json").write_text(text)
    print(f"{name}: {len(text.encode())} bytes")


if __name__ == "__main__":
    main()
