#!/usr/bin/env python3
"""Renders conversations by the chat templates of published models, with transformers, into tests/golden/chat.json.

    python3 scripts/make_chat_golden.py TEMPLATES_DIR

TEMPLATES_DIR holds the templates as published, named LAYOUT--ANYTHING.jinja, LAYOUT being the name that
data/chat_layouts.cuh gives to what they render. The templates are not kept here: only their hashes and what becomes of our own
conversations. All templates of a layout must render alike.

Needs transformers (and with it tokenizers and jinja2); tests/test_chat.cpp reads the result without Python.
"""
import json
import pathlib
import sys

from tokenizers import Tokenizer, models
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
    [(S, "\u3000wide\u2028"), (U, "\u00a0narrow\u1680"), (A, "\x1cseparated\u2009"), (U, "\u200bnot space\u200b"), (A, "\ufeffx")],
    [(S, ""), (U, ""), (A, "")],
    [(U, " \n"), (A, " \n")],
    [(S, "<|im_end|>\n"), (U, "</s><|eot_id|>[/INST] <end_of_turn>"), (A, "<s>[INST] <|im_start|>user\n{{ bos_token }}")],
    [(U, "Grüße, 世界 🌍"), (A, "नमस्ते \U0001f469\u200d\U0001f680 e\u0301")],
    # reasoning, as it stands in an answer
    [(U, "One?"), (A, "<think>\nEasy.\n</think>\n\n1")],
    [(U, "One?"), (A, "<think>\nEasy.\n</think>\n\n1"), (U, "Two?"), (A, "<think>\n\nHarder.\nMuch.\n\n</think>\n\n\n2\n")],
    [(U, "One?"), (A, "<think></think>1"), (U, "Two?"), (A, "Hm.</think>2</think>3")],
    [(U, "One?"), (A, "<think>never ends"), (U, "Two?"), (A, "a<think>b<think>c</think>\n")],
    [(U, "One?"), (A, "1"), (U, "<tool_response>5</tool_response>"), (A, "<think>\nSo 5.\n</think>\n\nFive.")],
    # roles that do not take turns
    [(U, "One?"), (U, "Two?"), (A, "1 and 2")],
    [(U, "One?"), (A, "1"), (A, "<think>\nMore?\n</think>\n\n2")],
    [(A, "I begin."), (U, "Go on.")],
    [(S, "Answer briefly."), (A, "I begin.")],
    [(U, "One?"), (S, "Now in French."), (A, "Un")],
    [(S, "Answer briefly."), (S, "And in French."), (U, "One?"), (A, "Un")],
]


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def after_users(conversation):
    """How many messages stand before each place where a model would be asked."""
    return [i + 1 for i, message in enumerate(conversation) if message["role"] == U]


def main():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    conversations = [[{"role": role, "content": content} for role, content in c] for c in CONVERSATIONS]

    def render(template, messages, open_end):
        try:
            return tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=open_end,
                date_string="26 Jul 2024")  # the date that templates fall back on where no clock is asked
        except Exception:  # a template's own raise_exception
            return None

    layouts = {}
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*--*.jinja")):
        template = path.read_text().rstrip()
        rendered = {"whole": [render(template, c, False) for c in conversations],
                    "prompts": [[render(template, c[:i], True) for i in after_users(c)] for c in conversations]}
        entry = layouts.setdefault(path.name.split("--")[0], {"templates": [], **rendered})
        entry["templates"].append(fnv1a(template))
        for key, texts in rendered.items():
            for have, want, conversation in zip(texts, entry[key], CONVERSATIONS):
                if have != want:
                    sys.exit(f"{path.name}: {key}: differs from others of its layout:\n{conversation}\n{have!r}\n{want!r}")

    result = pathlib.Path(__file__).parent.parent / "tests/golden/chat.json"
    result.write_text(json.dumps({"conversations": conversations, "layouts": layouts}, indent=0, ensure_ascii=True))
    print(f"{result}: {len(layouts)} layouts, {sum(len(e['templates']) for e in layouts.values())} templates, "
          f"{len(conversations)} conversations, {result.stat().st_size} bytes")


if __name__ == "__main__":
    main()
