#!/usr/bin/env python3
"""Writes tests/golden/chat.json: conversations rendered with published chat templates by transformers; and
tests/golden/chat_tokens.json: the same, tokenised with small tokenizers of the types that such models use.

    python3 scripts/make_chat_golden.py TEMPLATES_DIR

TEMPLATES_DIR holds the published templates in files named LAYOUT--ANYTHING.jinja, where LAYOUT is a name in
data/documents/chat_layouts.h. This repository keeps the hashes of the templates and our rendered conversations, not the
templates. All templates of a layout must render the same text.

Needs: pip install transformers jinja2. tests/test_chat.cpp reads the result without Python.
"""
import json
import pathlib
import sys

from make_tokenizer_golden import BYTES, LLAMA3, UNDERSCORE, Hash, byte_level, fallback, sequence, split
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

S, U, A = "system", "user", "assistant"
CONVERSATIONS = [
    [(U, "How far is the moon?")],
    [(U, "How far is the moon?"), (A, "About 384 000 km.")],
    [(S, "Answer briefly."), (U, "How far is the moon?"), (A, "About 384 000 km.")],
    [(S, "Answer briefly."), (U, "One?"), (A, "1"), (U, "Two?"), (A, "2"), (U, "Three?"), (A, "3")],
    [(U, "One?"), (A, "1"), (U, "Two?"), (A, "2")],
    [(S, "Answer briefly."), (U, "One?"), (A, "1"), (U, "Two?")],
    [(S, "  Spaced. \n"), (U, "\n around \n\n"), (A, "  \tand here\n "), (U, " more "), (A, "\n\nend\n")],
    [(S, "\u3000wide\u2028"), (U, "\u00a0narrow\u1680"), (A, "\x1cseparated\u2009"),
     (U, "\u200bnot space\u200b"), (A, "\ufeffx")],
    [(S, ""), (U, ""), (A, "")],
    [(U, " \n"), (A, " \n")],
    [(S, "<|im_end|>\n"), (U, "</s><|eot_id|>[/INST] <end_of_turn>"),
     (A, "<s>[INST] <|im_start|>user\n{{ bos_token }}")],
    [(U, "Grüße, 世界 🌍"), (A, "नमस्ते \U0001f469\u200d\U0001f680 e\u0301")],
    # reasoning inside an answer
    [(U, "One?"), (A, "<think>\nEasy.\n</think>\n\n1")],
    [(U, "One?"), (A, "<think>\nEasy.\n</think>\n\n1"),
     (U, "Two?"), (A, "<think>\n\nHarder.\nMuch.\n\n</think>\n\n\n2\n")],
    [(U, "One?"), (A, "<think></think>1"), (U, "Two?"), (A, "Hm.</think>2</think>3")],
    [(U, "One?"), (A, "<think>never ends"), (U, "Two?"), (A, "a<think>b<think>c</think>\n")],
    [(U, "One?"), (A, "1"), (U, "<tool_response>5</tool_response>"), (A, "<think>\nSo 5.\n</think>\n\nFive.")],
    # roles that do not alternate
    [(U, "One?"), (U, "Two?"), (A, "1 and 2")],
    [(U, "One?"), (A, "1"), (A, "<think>\nMore?\n</think>\n\n2")],
    [(A, "I begin."), (U, "Go on.")],
    [(S, "Answer briefly."), (A, "I begin.")],
    [(U, "One?"), (S, "Now in French."), (A, "Un")],
    [(S, "Answer briefly."), (S, "And in French."), (U, "One?"), (A, "Un")],
]


def fnv1a(text):
    digest = Hash()
    digest.add(text.encode())
    return f"{digest.value:016x}"


def after_users(conversation):
    """The number of messages before each point where a model would generate."""
    return [i + 1 for i, message in enumerate(conversation) if message["role"] == U]


TEXT = ["How far is the moon? About 384 000 km. Answer briefly. One? Two? Three? 1 2 3 user assistant system model\n\n",
        "<|user|>\n <|assistant|>\n [INST] more and around [/INST] \u00fc e\u0301 end here I am, you are, don't."]


def byte_tokenizer(special):
    """Like GPT-2, Llama 3 and Qwen: bytes, split by a pattern."""
    tokenizer = byte_level(sequence(pre_tokenizers, split(LLAMA3), BYTES), size=360, texts=TEXT * 3)
    tokenizer.add_special_tokens(special)
    thinking = [AddedToken(name, normalized=False) for name in ("<think>", "</think>")]  # not special, as in Qwen3
    tokenizer.add_tokens(thinking)
    return tokenizer


def sentencepiece(special, legacy):
    """Like Llama 2 and Mistral: characters. A space precedes the text; with `legacy`, each text between special tokens."""
    decoder = sequence(decoders, UNDERSCORE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    lines = [word for text in TEXT for word in text.replace(" ", " \u2581").split(" ")]
    tokenizer = fallback(decoder=decoder, size=430, texts=lines * 3, special=["<unk>"])
    if legacy:
        tokenizer.normalizer = sequence(normalizers, normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581"))
        tokenizer.pre_tokenizer = sequence(pre_tokenizers)
    else:
        tokenizer.normalizer = sequence(normalizers)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(special)
    return tokenizer


def special(*names):
    return [AddedToken(name, special=True, normalized=False) for name in names]


TOKENIZERS = {
    "byte_level": (lambda: byte_tokenizer(special("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>",
                                                  "<|end_header_id|>", "<|eot_id|>")),
                   ["chatml", "qwen3", "llama3.1"]),
    "legacy": (lambda: sentencepiece(special("<s>", "</s>"), True), ["mistral-v1", "mistral-v1-system", "zephyr"]),
    "metaspace": (lambda: sentencepiece(special("<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>",
                                                "<end_of_turn>"), False),
                  ["mistral-v3", "mistral-v3-tekken", "gemma3", "zephyr"]),
}


def crosses(tokenizer, text, borders):
    """Whether a token spans one of these offsets."""
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return any(begin < border < end for begin, end in spans for border in borders)


def tokenise(directory, conversations, render):
    result = {}
    for name, (make, layouts) in TOKENIZERS.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), bos_token="<s>", eos_token="</s>")
        result[name] = {"tokenizer": json.loads(tokenizer.backend_tokenizer.to_str()), "layouts": {}}
        for layout in layouts:
            template = sorted(directory.glob(f"{layout}--*.jinja"))[0].read_text().rstrip()
            cases = []
            for c in [0, 1, 2, 3, 4, 5, 6, 11, 13]:
                text = render(template, conversations[c], False)
                if text is None:
                    continue
                ids = tokenizer.apply_chat_template(conversations[c], chat_template=template, tokenize=True,
                                                    date_string="26 Jul 2024", return_dict=False)
                assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
                # An answer begins where its prompt ends; no prompt can end inside a token.
                borders = [len(prompt) for i, m in enumerate(conversations[c]) if m["role"] == A
                           for prompt in [render(template, conversations[c][:i], True)] if text.startswith(prompt)]
                if not crosses(tokenizer, text, borders):
                    cases.append({"conversation": c, "ids": ids})
            result[name]["layouts"][layout] = cases
            print(f"{name}, {layout}: {len(cases)} conversations")
    return result


def main():
    directory = pathlib.Path(sys.argv[1])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    conversations = [[{"role": role, "content": content} for role, content in c] for c in CONVERSATIONS]

    def render(template, messages, open_end):
        try:
            return tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=open_end,
                date_string="26 Jul 2024")  # the default date of templates without a clock
        except Exception:  # raise_exception in a template
            return None

    layouts = {}
    for path in sorted(directory.glob("*--*.jinja")):
        template = path.read_text().rstrip()
        rendered = {"whole": [render(template, c, False) for c in conversations],
                    "prompts": [[render(template, c[:i], True) for i in after_users(c)] for c in conversations]}
        entry = layouts.setdefault(path.name.split("--")[0], {"templates": [], **rendered})
        entry["templates"].append(fnv1a(template))
        for key, texts in rendered.items():
            for have, want, conversation in zip(texts, entry[key], CONVERSATIONS):
                if have != want:
                    sys.exit(f"{path.name}: {key}: differs from others of its layout:\n"
                             f"{conversation}\n{have!r}\n{want!r}")

    result = pathlib.Path(__file__).parent.parent / "tests/golden/chat.json"
    result.write_text(json.dumps({"conversations": conversations, "layouts": layouts}, indent=0, ensure_ascii=True))
    print(f"{result}: {len(layouts)} layouts, {sum(len(e['templates']) for e in layouts.values())} templates, "
          f"{len(conversations)} conversations, {result.stat().st_size} bytes")
    tokens = result.with_name("chat_tokens.json")
    tokens.write_text(json.dumps(tokenise(directory, conversations, render), separators=(",", ":"), ensure_ascii=True))
    print(f"{tokens}: {tokens.stat().st_size} bytes")


if __name__ == "__main__":
    main()
