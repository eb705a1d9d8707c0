#!/usr/bin/env python3
"""Checks chat templates against transformers: the text of conversations, and what is learned of them.

    scripts/check_templates.py DIRECTORY     # of .jinja files, for example TRL's package or llama.cpp's models/templates

Every template renders the conversations of make_chat_golden.py in transformers and in `streambp tokenize`; the texts must be
equal, with arguments of calls as objects or as text, and a conversation that one refuses must be refused by the other. Where there is NAME_training.jinja for NAME.jinja, as
in TRL, what streambp learns with NAME.jinja is compared with what the other marks as generated, without what is in the prompt
already and what follows the end of the turn. What remains different: marks that cover a part of the prompt which the turn renders
otherwise; a second end token after the first; earlier turns that the model ends otherwise than the template shows later (gpt-oss);
conversations that the assistant begins.

Needs: pip install transformers jinja2 tokenizers"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

from make_chat_golden import CONVERSATIONS, MORE, Today, message
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.utils import chat_template_utils

NAMES = ("reasoning_content", "reasoning", "thinking")
END = re.compile(r"eot|eom|end_of_(?:turn|utterance)|im_end|<turn\|>|END_OF_TURN|end\u2581of\u2581sentence|\|end\||\|user\||return\||call\||</s>")
OWN = {"bos_token": "<s>", "eos_token": "</s>"}


def complete(m):
    """The message with every name of its reasoning, so that nothing is left to add."""
    given = [m[name] for name in NAMES if name in m]
    return m | {name: given[0] for name in NAMES} if given else m


def with_texts(conversation):
    """The same with arguments of calls as JSON's text, for templates that want this."""
    copy = json.loads(json.dumps(conversation))
    for m in copy["messages"]:
        for c in m.get("tool_calls", []):
            c["function"]["arguments"] = json.dumps(c["function"]["arguments"], ensure_ascii=False)
    return copy


def conversations():
    all_of_them = [{"messages": [message(role, content) for role, content in c]} for c in CONVERSATIONS] + MORE
    for c in all_of_them:
        yield c | {"messages": [complete(m) for m in c["messages"]]}


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


def in_streambp(binary, folder, conversation, learn):
    """The documents of a conversation, or None if it is refused."""
    data, seen = folder / "data.jsonl", folder / "seen.jsonl"
    others = {k: v for k, v in conversation.items() if k not in ("messages", "tools")}
    line = {k: v for k, v in conversation.items() if k in ("messages", "tools")} | {"chat_template_kwargs": others}
    data.write_text(json.dumps(line) + "\n")
    seen.unlink(missing_ok=True)
    done = subprocess.run([binary, "tokenize", "--model", folder, "--data", data, "--out", folder / "out.safetensors", "--render",
                           seen, "--learn", learn, "--trust-messages", "--date", "2026-11-25"], capture_output=True, text=True)  # fmt: skip
    assert done.returncode in (0, 1, 2), done.stderr
    if done.returncode != 0:
        return None, done.stderr.strip()
    return [json.loads(documents) for documents in seen.read_text().strip("\n").split("\n")], ""


def in_transformers(source, conversation, spans=False):
    compiled = chat_template_utils._compile_jinja_template(source)
    arguments = {"tools": None, "documents": None, "add_generation_prompt": False} | OWN | conversation
    try:
        if not spans:
            return compiled.render(**arguments)
        text, indices = chat_template_utils._render_with_assistant_indices(
            compiled, arguments["messages"], arguments["tools"], None, False,
            **{k: v for k, v in arguments.items() if k not in ("messages", "tools", "documents", "add_generation_prompt")})
        return [text[a:b] for a, b in indices]
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
    texts = refused = different = 0
    for file in files:
        source = file.read_text()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_model(folder, source)
            for number, c in enumerate(conversations()):
                accepted = [t or None for t in (in_transformers(source, c), in_transformers(source, with_texts(c)))]
                expected = accepted[0]
                documents, error = in_streambp(options.streambp, folder, c, "all")
                text = documents[0]["text"] if documents else None
                texts += 1
                refused += text is None
                if text not in accepted and "the text has one token" not in error:
                    different += 1
                    print(f"{file.name}, conversation {number}: {text!r:.200} instead of {expected!r:.200} {error:.200}")
    print(f"{len(files)} templates, {texts} texts, {refused} of them refused by both; {different} different", flush=True)

    learned = unequal = 0
    for marked in sorted(options.directory.rglob("*_training.jinja")):
        file = marked.with_name(marked.name.replace("_training", ""))
        if not file.exists():
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_model(folder, file.read_text())
            for number, c in enumerate(conversations()):
                theirs = in_transformers(marked.read_text(), c, spans=True)
                ours, error = in_streambp(options.streambp, folder, c, "answers")
                if not theirs or ours is None:
                    continue
                parts = [d["text"].encode()[a:b].decode() for d in ours for a, b in d["learned"]]
                learned += 1
                prompts = [in_transformers(file.read_text(), c | {"messages": c["messages"][:i], "add_generation_prompt": True}) or ""
                           for i, m in enumerate(c["messages"]) if m["role"] == "assistant" and i > 0]  # fmt: skip
                if sorted(parts) != sorted(generated(mark, prompts) for mark in theirs):
                    unequal += 1
                    print(f"{file.name}, conversation {number}: learns {parts!r:.300}; the training template marks {theirs!r:.300}")
    print(f"{learned} conversations with marks: {unequal} are learned otherwise")


if __name__ == "__main__":
    main()
