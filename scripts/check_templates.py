#!/usr/bin/env python3
"""Checks chat templates against transformers: the text of conversations, and what is learned of them.

    scripts/check_templates.py DIRECTORY     # of .jinja files, for example TRL's package or llama.cpp's models/templates

Every template renders the conversations of make_chat_golden.py, and some with content in parts, in transformers'
`apply_chat_template` and in `streambp tokenize`. The texts must be equal, with arguments of calls as objects or as text and with
content as text or in parts, whichever keeps most of the conversation; a conversation that one refuses must be refused by the other.
What remains: a template that reads reasoning under the name `reasoning` alone gets it, which transformers does not give it; and
streambp refuses conversations with an answer that the template leaves out, in whole or from its second part on.

Where there is NAME_training.jinja for NAME.jinja, as in TRL, what streambp learns with NAME.jinja is compared with what the other
marks as generated, without what is in the prompt already and what follows the end of the turn. What remains different: marks that
cover a part of the prompt which the turn renders otherwise; a second end token after the first; earlier turns that the model ends
otherwise than the template shows later (gpt-oss); conversations that the assistant begins.

Needs: pip install transformers jinja2 tokenizers"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from make_chat_golden import CONVERSATIONS, MORE, Today, call, message
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

END = re.compile(r"eot|eom|end_of_(?:turn|utterance)|im_end|<turn\|>|END_OF_TURN|end\u2581of\u2581sentence|\|end\||\|user\||return\||call\||</s>")
OWN = {"bos_token": "<s>", "eos_token": "</s>"}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


OTHERS = [
    {"messages": [message("user", parts("One?")), message("assistant", parts("1"))]},
    {"messages": [message("system", parts("Be brief.")), message("user", parts("One?")), message("assistant", parts("The first"))]},
    {"messages": [message("user", parts("One? ", "Two?")), message("assistant", "1 and 2")]},
    {"messages": [message("user", "One?"), message("assistant", parts("The first", " and more"))]},
    {"messages": [message("user", "One?"), message("assistant", "", tool_calls=[call({"most": 2**80, "least": -2**64})])]},
    {"messages": [message("user", "One?"), message("assistant", "", tool_calls=[call({"far": float("inf")})])]},
]


def text_of(content):
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def variants(conversation):
    """The conversation in the forms that templates read: arguments of calls as objects or text, content as it is, text or parts."""
    for arguments in (lambda a: a, lambda a: json.dumps(a, ensure_ascii=False)):
        for content in (lambda c: c, lambda c: text_of(c) if c else c, lambda c: parts(c) if isinstance(c, str) else c):
            copy = json.loads(json.dumps(conversation))
            for m in copy["messages"]:
                m["content"] = content(m["content"])
                for c in m.get("tool_calls") or []:
                    c["function"]["arguments"] = arguments(c["function"]["arguments"])
            yield copy


def accepted(tokenizer, conversation):
    """What transformers renders: first as the conversation is, then all texts that keep most of its content."""
    texts = [in_transformers(tokenizer, v) for v in variants(conversation)]
    contents = [text_of([p]).split("</think>")[-1].strip() for m in conversation["messages"] if m["content"]
                for p in (m["content"] if isinstance(m["content"], list) else parts(m["content"]))]  # fmt: skip
    kept = [0 if t is None else 1 + sum(c in t for c in contents) - 9 * ("'type': 'text'" in t) for t in texts]
    return texts[0], {t for t, k in zip(texts, kept) if k == max(kept)}


def conversations():
    return [{"messages": [message(role, content) for role, content in c]} for c in CONVERSATIONS] + MORE + OTHERS


def make_model(folder, source):
    """A directory with a tokenizer of bytes and of what looks like a token in the template."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = set(re.findall(r"<[|\uff5c][^<>{}'\"]+?[|\uff5c]>|<(?:start|end)_of_[a-z]+>|<\|?turn\|?>|\[/?[A-Z_]+\]", source)) | set(OWN.values())
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in sorted(found)])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = [t for t in found if END.search(t)]
    (folder / "tokenizer_config.json").write_text(json.dumps(OWN))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(t) for t in ends]}))
    (folder / "chat_template.jinja").write_text(source)
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=source, **OWN)


def in_streambp(binary, folder, conversation, learn):
    """The documents of a conversation, or None if it is refused."""
    data, seen = folder / "data.jsonl", folder / "seen.jsonl"
    others = {k: v for k, v in conversation.items() if k not in ("messages", "tools")}
    line = {k: v for k, v in conversation.items() if k in ("messages", "tools")} | {"chat_template_kwargs": others}
    data.write_text(json.dumps(line).replace("Infinity", "1e400") + "\n")
    seen.unlink(missing_ok=True)
    done = subprocess.run([binary, "tokenize", "--model", folder, "--data", data, "--out", folder / "out.safetensors", "--render",
                           seen, "--learn", learn, "--trust-messages", "--date", "2026-11-25"], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode in (0, 1, 2), done.stderr
    if done.returncode != 0:
        return None, done.stderr.strip()
    return [json.loads(documents) for documents in seen.read_text().strip("\n").split("\n")], ""


def in_transformers(tokenizer, conversation, prompt=False):
    others = {k: v for k, v in conversation.items() if k not in ("messages", "tools")}
    try:
        return tokenizer.apply_chat_template(conversation["messages"], tools=conversation.get("tools"), tokenize=False,
                                             add_generation_prompt=prompt, **others)  # fmt: skip
    except Exception:
        return None


def marked_in_transformers(source, conversation):
    """The texts in {% generation %} blocks."""
    others = {k: v for k, v in conversation.items() if k != "messages"} | OWN
    messages = chat_template_utils._normalize_chat_messages(conversation["messages"])
    try:
        texts, spans = chat_template_utils.render_jinja_template([messages], chat_template=source, return_assistant_tokens_mask=True, **others)
        return [texts[0][a:b] for a, b in spans[0]]
    except Exception:
        return None


def generated(mark, prompts):
    """What a model generates of a marked text: not what its prompt has already, and nothing after the end of the turn."""
    given = max(k for k in range(len(mark) + 1) if k == 0 or any(p.endswith(mark[:k]) for p in prompts))
    end = END.search(mark)
    close = mark.find(">", end.end() - 1) + 1 if end else len(mark)
    return mark[given:close]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("directory", type=Path, help="with .jinja files, also in folders inside")
    parser.add_argument("--streambp", type=Path, default=root / "build" / "streambp", help="the program")
    options = parser.parse_args()
    chat_template_utils.datetime = Today
    files = sorted(options.directory.rglob("*.jinja"))
    assert files, f"{options.directory}: no .jinja files"
    counts = Counter()
    for file in files:
        source = file.read_text()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tokenizer = make_model(folder, source)
            for number, c in enumerate(conversations()):
                expected, texts = accepted(tokenizer, c)
                documents, error = in_streambp(options.streambp, folder, c, "all")
                text = documents[0]["text"] if documents else None
                counts["texts"] += 1
                kind = ("different" if text is not None else "refused by both" if not expected
                        else "answer lost" if "does not write the answer" in error else "refused alone")  # fmt: skip
                if text is None or text not in texts:
                    counts[kind] += 1
                if kind in ("refused alone", "answer lost") or (text is not None and text not in texts):
                    print(f"{file.name}, conversation {number}: {kind}: {text!r:.200} instead of {expected!r:.200} {error}", flush=True)
    print(f"{len(files)} templates, {counts['texts']} texts, {counts['refused by both']} of them refused by both: "
          f"{counts['different']} different, {counts['refused alone']} refused by streambp alone, "
          f"{counts['answer lost']} because the template leaves out an answer", flush=True)  # fmt: skip

    learned = unequal = 0
    for marked in sorted(options.directory.rglob("*_training.jinja")):
        file = marked.with_name(marked.name.replace("_training", ""))
        if not file.exists():
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tokenizer = make_model(folder, file.read_text())
            for number, c in enumerate(conversations()):
                theirs = marked_in_transformers(marked.read_text(), c)
                ours, error = in_streambp(options.streambp, folder, c, "answers")
                if not theirs or ours is None:
                    continue
                parts = [d["text"].encode()[a:b].decode() for d in ours for a, b in d["learned"]]
                learned += 1
                prompts = [in_transformers(tokenizer, c | {"messages": c["messages"][:i]}, prompt=True) or ""
                           for i, m in enumerate(c["messages"]) if m["role"] == "assistant" and i > 0]  # fmt: skip
                if sorted(parts) != sorted(generated(mark, prompts) for mark in theirs):
                    unequal += 1
                    print(f"{file.name}, conversation {number}: learns {parts!r:.300}; the training template marks {theirs!r:.300}")
    print(f"{learned} conversations with marks: {unequal} are learned otherwise")


if __name__ == "__main__":
    main()
