#!/usr/bin/env python3
"""Writes what transformers and jinja2 make of chat templates:

    tests/golden/chat.json         conversations, rendered with the templates in tests/golden/chat_templates
    tests/golden/chat_tokens.json  the same, tokenised with small tokenizers of the types that such models use
    tests/golden/language.json     expressions and statements, one by one

    python3 scripts/make_chat_golden.py

Needs: pip install transformers jinja2. tests/test_chat.cpp and tests/test_template.cpp read the results without Python.
"""
import datetime
import json
import pathlib

from make_tokenizer_golden import BYTES, LLAMA3, UNDERSCORE, byte_level, fallback, sequence, split
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

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


WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "The weather in a \"city\".", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}


def call(arguments):
    return {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def message(role, content, **others):
    return {"role": role, "content": content} | others


MORE = [
    {"messages": [message(S, "Be brief."), message(U, "How warm is it in Z\u00fcrich?"),
                  message(A, "", tool_calls=[call({"city": "Z\u00fcrich", "days": 1})]), message("tool", "21 \u00b0C"),
                  message(A, "21 \u00b0C.")], "tools": [WEATHER]},
    {"messages": [message(U, "How warm is it in Z\u00fcrich and Bern?"),
                  message(A, "I look.", tool_calls=[call({"city": "Z\u00fcrich"}), call({"city": "Bern"})]),
                  message("tool", "21"), message("tool", "22"), message(A, "21 and 22.", reasoning_content="Read.\n"),
                  message(U, "Thanks"), message(A, "Gladly.", reasoning_content="A greeting.")], "tools": [WEATHER]},
    {"messages": [message(U, "One?"), message(A, "1", reasoning_content="Easy."), message(U, "Two?")],
     "enable_thinking": False},
    {"messages": [message(U, "One?"), message(A, None, tool_calls=[call({"city": "Bern"})])]},
    {"messages": [message(U, "One?"), message("judge", "x")]},
    {"messages": [message(U, "One?"), message(A, "1")], "date_string": "26 Jul 2024"},
    # members that are null, as exported tables have them
    {"messages": [message(U, "How warm is it?", name=None), message(A, None, tool_calls=[call({"city": "Bern"})]),
                  message("tool", "21", tool_calls=None), message(A, "21.", tool_calls=None)], "tools": [WEATHER]},
    {"messages": [message(U, "One?"), message(A, "1", tool_calls=None, reasoning_content=None), message(U, "Two?"),
                  message(A, "2", tool_calls=None, reasoning_content="Easy.")]},
]


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
                   ["turns", "marked", "headers"]),
    "legacy": (lambda: sentencepiece(special("<s>", "</s>"), True), ["brackets", "roles"]),
    "metaspace": (lambda: sentencepiece(special("<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>",
                                                "<end_of_turn>"), False), ["brackets", "parts", "roles"]),
}


def crosses(tokenizer, text, borders):
    """Whether a token spans one of these offsets."""
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return any(begin < border < end for begin, end in spans for border in borders)


def tokenise(templates, conversations, render):
    result = {}
    for name, (make, names) in TOKENIZERS.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), bos_token="<s>", eos_token="</s>")
        result[name] = {"tokenizer": json.loads(tokenizer.backend_tokenizer.to_str()), "templates": {}}
        for template in names:
            cases = []
            for c in [0, 1, 2, 3, 4, 5, 6, 11, 13]:
                text = render(templates[template], conversations[c], False)
                if text is None:
                    continue
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                # An answer begins where its prompt ends; no prompt can end inside a token.
                messages = conversations[c]["messages"]
                borders = [len(prompt) for i, m in enumerate(messages) if m["role"] == A and i > 0
                           for prompt in [render(templates[template], {"messages": messages[:i]}, True)]
                           if prompt and text.startswith(prompt)]
                if not crosses(tokenizer, text, borders):
                    cases.append({"conversation": c, "ids": ids})
            result[name]["templates"][template] = cases
            print(f"{name}, {template}: {len(cases)} conversations")
    return result


# Each is rendered with these variables.
VARIABLES = {
    "n": 7, "x": -2.5, "big": 1e16, "small": 1.5e-5, "yes": True, "nothing": None, "s": " A b\u00e9\n", "quotes": "it's \"q\"",
    "list": [3, 1, 2], "words": ["b", "A", "c", "a"], "empty": [], "dict": {"b": 1, "a": [1, 2.0, None], "items": "own"},
    "people": [{"name": "Bo", "age": 3, "tags": ["x"]}, {"name": "al", "age": 1}, {"name": "Cy", "age": 2, "ok": False}],
    "deep": {"a": {"b": [{"c": "d"}]}}, "us": "a\u2028b\x0bc\n\nd", "ligatures": "\ufb01ne \u00df \u0390 \u0130i \u01c6 \ufb13", "wide": "\u65e5\u672c\u8a9e \U0001d11e\u0007",
}
EXPRESSIONS = """
1 + 2 * 3 - 4 / 2 | 7 // 2 | -7 // 2 | -7 % 3 | 7 % -3 | 2 ** 3 ** 2 | -2 ** 2 | 7.5 % 2 | -7.5 // 2 | 1 / 3 | 2 ** -1
n + x | n * 2.0 | n ~ x ~ s ~ nothing ~ yes | 'a' 'b' | 'ab' * 3 | [1] + [2] | (1, 2) + (3,) | 3 * [0] | true + 1
1 < 2 <= 2 < 3 | 1 < 2 > 5 | 'a' < 'b' | [1, 2] < [1, 3] | 1 == 1.0 | true == 1 | '1' == 1 | none == nothing | 1 != 2
'b' in 'abc' | 3 in list | 'b' in dict | 4 not in list | not 1 == 2 | not n or yes and nothing | nothing or 'x' | n and 0
'a' if yes else 'b' | 'a' if nothing | 'a' if nothing else 'b' if n > 8 else 'c' | (1, 2) | (1,) | () | [] | {} | {'a': 1}
list[0] | list[-1] | list[9] | list[1:] | list[::-1] | list[-2:] | list[5:1:-2] | s[2:4] | s[::-1] | wide[0] | dict.b
dict['a'][1] | deep.a.b[0].c | deep['a']['b'] | dict.missing | dict.items()|list | dict['items'] | dict.keys()|list | dict.get('z', 5)
dict.get('z') | missing | missing is defined | n is defined | dict.zz is not defined | missing or 'd' | missing == none
big | small | 1e5 | 1.0 | 100000000000000000000.0 | 0.1 + 0.2 | 123456789012345678 | 1e-4 | 1e22 | x * 1e300 * 1e300
[1, 2.0, 'a', none, true, {'k': [1]}] | quotes | [quotes, s, wide] | ['a\\nb\\tc\\\\', "it's"] | {'a': 'b', 1: 2}
s.strip() | s.lstrip() | s.rstrip('\\n') | 'xxaxx'.strip('x') | 'a,b,,c'.split(',') | ' a  b '.split() | 'a b c'.split(' ', 1)
'a b c'.rsplit(' ', 1) | 'a b c d'.split(none, 2) | 'abc'.startswith('ab') | 'abc'.endswith(('x', 'bc')) | 'aXbX'.replace('X', '')
'aaa'.replace('a', 'b', 2) | 'ab'.replace('', '-') | s.upper() | s.lower() | 'stra\u00dfe'.upper() | 'hello wORLD'.title()
'hello wORLD'.capitalize() | 'abcabc'.find('c') | 'abc'.rfind('z') | 'abcabc'.count('bc') | ', '.join(words) | 'a\\nb\\r\\nc'.splitlines()
'{} and {}'.format(1, 'b') | '{1}{0}{k}'.format(1, 2, k=3)
'prefix-x'.removeprefix('prefix-') | 'x.py'.removesuffix('.py') | '12'.isdigit() | ''.isdigit()
'abcb'.index('b') | list.index(1) | list.count(3) | dict.copy()
'%s is %d%%' % ('a', 3) | '%s' % n
s|trim | 'xax'|trim('x') | list|length | s|length | dict|length | missing|length | list|first | words|last | empty|first | list|join
words|join(', ') | people|join('/', attribute='name') | 'abc'|join('-') | 'ab'|list | dict|list | list|string | none|string
missing|default('d') | nothing|default('d') | nothing|default('d', true) | ''|d('e', boolean=true) | n|default('d') | missing|default
words|sort | words|sort(reverse=true) | words|sort(case_sensitive=true) | people|sort(attribute='age')|map(attribute='name')|list
list|min | list|max | words|min | empty|max | list|sum | people|sum(attribute='age') | people|sum('age', 10) | -3|abs | x|abs
words|unique|list | [1, 1, 2]|unique|list | list|reverse|list | 'abc'|reverse | list|map('string')|list | words|map('upper')|join
people|map(attribute='tags', default='none')|list | people|selectattr('ok', 'defined')|map(attribute='name')|list
people|selectattr('age', 'gt', 1)|map(attribute='name')|join(',') | people|rejectattr('tags')|list|length | list|select('odd')|list
list|reject('equalto', 1)|list | people|selectattr('ok')|list | empty|selectattr('x')|list | nothing|map('upper')|list | list|select|list
list|batch(2)|list | list|batch(2, 0)|list | [1,2,3,4,5]|slice(2)|list | [1,2,3,4,5]|slice(3, 'x')|list | 'a\\nb\\n\\nc'|indent
'a\\nb'|indent(2, true) | 'a\\n\\nb'|indent(1, blank=true) | 'a\\nb'|indent('> ') | '42'|int | ' 4.7 '|int | 'x'|int | 'x'|int(5)
3.9|int | '2.5'|float | 'x'|float | true|int | 2.5|round | 3.5|round | 2.345|round(2) | 2.1|round(method='ceil') | 2.9|round(0, 'floor')
7|round | 'hello world-of (x)'|title | 'ABC def'|capitalize | 'a'|upper | s|lower | 'aXb'|replace('X', 'Y')
dict|tojson | s|tojson | wide|tojson | wide|tojson(ensure_ascii=true) | dict|tojson(indent=2) | [[], {}]|tojson(indent=1)
dict|tojson(separators=(',', ':')) | dict|tojson(sort_keys=true) | x|tojson | {1: true, none: 2}|tojson | quotes|tojson | '</a>&'|tojson
dict|dictsort | {'b': 1, 'A': 2}|dictsort | {'b': 1, 'A': 2}|dictsort(true) | {'b': 1, 'a': 2}|dictsort(by='value') | dict|items|list
'%s-%s'|format(1, 'b') | 'x'|safe | '<'|safe + '<&"' | '<' + '>'|safe | '<'|safe ~ '<' | (1, 2)|list | range(3)|list | range(5, 0, -2)|list
n is number | x is float | n is float | n is integer | yes is integer | yes is boolean | nothing is none | s is string | list is string
dict is mapping | list is mapping | list is sequence | s is sequence | dict is iterable | n is iterable | missing is iterable | range is callable
n is odd | n is even | n is divisibleby 7 | n is divisibleby(2) | yes is true | yes is false | 1 is true | n is eq 7 | n is equalto(7) | n is ne 7
n is gt 6 | n is ge 7 | n is lt 7 | n is le(7) | 3 is in list | 3 is in([1, 2]) | 'a' is lower | 'A' is upper | n is sameas 7 | 'join' is filter
not n is odd | n is not odd | n is odd and yes | namespace(a=1).a | dict(a=1, b='c') | 'a'.missing is defined | n.real is string
range(2)|map('string')|list | 'a'|replace('a', 'b')|upper ~ 'c' | (list|sort)[0] | list|sort|first + 1 | {'a': 1}.a | [1, [2, [3]]][1][1]
'\\x41\\u00e9\\101\\q' | 'a\\'b' | "a\\"b" | 1_000 | 1.5e3 | 'a' * n | dict == {'b': 1} | [1, 2] == [1, 2] | (1, 2) == [1, 2]
us|indent(2) | ligatures|upper | ligatures.title() | ligatures|capitalize | ligatures|lower | [1,2,3,4]|slice(2, 'x')|list
[1]|slice(3, 'x')|list | 25|round(-1) | 35.5|round(-1) | -15|round(-1) | 1234567|round(-3) | -0.2|round(method='ceil') | x % 0.5
range(3) | range(1, 9, 2) ~ '' | [range(2)] | range(2)|tojson | range(2) + range(2) | '1_000'|float | '1_000'|int | '1__0'|int(7) | 'abc' % 1
'%s' % (1, 2) | [1] < (1,) | missing is callable
raise_exception('no') | missing.x | missing['x'] | n() | nothing.x | nothing[0] | 1 + 'a' | 'a' + none | 1 / 0 | 1 % 0 | list < 3 | missing + 1
list.append(1) | dict.update({}) | s|nosuchfilter | n is nosuchtest | 'a' in n | n[0] | n|length | 'abc'.nosuch() | [1] * 'a' | x|tojson(1) | missing|int
""".replace("\n", " | ").split(" | ")
STATEMENTS = [
    "{% for i in list %}{{ i }}{% if not loop.last %}, {% endif %}{% endfor %}", "{% for i in empty %}x{% else %}none{% endfor %}",
    "{% for i in list if i > 1 %}{{ loop.index }}/{{ loop.length }}:{{ i }} {% endfor %}", "{% for k, v in dict.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for i in list %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}",
    "{% for i in list %}{{ loop.cycle('a', 'b') }}{{ loop.depth }}{% endfor %}",
    "{% for i in [[1, [2]], [3]] recursive %}{% if i is iterable %}({{ loop(i) }}{{ loop.depth0 }}){% else %}{{ i }}{% endif %}{% endfor %}",
    "{% for i in list %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "{% for i in list %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for c in 'abc' %}{{ c }}-{% endfor %}", "{% for i in missing %}x{% endfor %}", "{% for k in dict %}{{ k }}{% endfor %}",
    "{% set a = 1 %}{% for i in list %}{% set a = a + i %}{{ a }} {% endfor %}{{ a }}", "{% set ns = namespace(a=1) %}{% for i in list %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}",
    "{% set a, b = 1, 'x' %}{{ a }}{{ b }}", "{% set a %}x{{ n }}{% endset %}[{{ a }}]{{ a is string }}", "{% set a | upper | trim %} x{% endset %}[{{ a }}]",
    "{% if n > 8 %}a{% elif n > 6 %}b{% else %}c{% endif %}", "{% if yes %}{% set a = 2 %}{% endif %}{{ a }}",
    "{% macro m(a, b='d', c=n) %}[{{ a }}{{ b }}{{ c }}{{ varargs }}{{ kwargs }}]{% endmacro %}{{ m(1) }}{{ m(1, 2, 3, 4) }}{{ m(b=5, z=6) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m() }}|{{ m(1) ~ m(2) }}|{{ m.name }}", "{% macro m(n) %}{{ n }}{% if n > 0 %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(3) }}",
    "{% macro m(a) %}<{{ caller(a + 1) }}>{% endmacro %}{% call(x) m(1) %}{{ x }}{{ n }}{% endcall %}", "{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}in{% endcall %}",
    "{% set z = 1 %}{% macro m() %}{{ z }}{% endmacro %}{% set z = 2 %}{{ m() }}", "{% filter upper %}a{{ s }}{% endfilter %}",
    "{% raw %}{{ x }} {% if %}{% endraw %}!", "a{# {{ x }} #}b", "a\n{# c #}\nb", "  {% if yes %}\n  x\n  {% endif %}\ny\n", "a {%- if yes -%} b {%- endif -%} c", "a\n  {{- n -}}\n b",
    "a\n  {%+ if yes %}b{% endif +%}\nc", "{{ n }}  {% if yes %}b{% endif %}", "x\n\n", "{% raw %}\n a {% endraw %}\nb", "a\r\nb\rc\n", "{{ '}}' }}{{ \"%}\" }}{{ {'a': {'b': 1}} }}",
    "{% generation %}a{{ n }}{% endgeneration %}b", "{% for a, b in [(1, 2), [3, 4]] %}{{ a }}{{ b }}{% endfor %}", "{% for i in range(3) %}{% for j in range(i) %}{{ loop.index }}{{ i }}{% endfor %};{% endfor %}",
    "{% if n %}", "{% endif %}", "{{ n", "{% for i %}{% endfor %}", "{{ 1 + }}", "{{ 'a }}", "{% set 1 = 2 %}", "{{ a b }}", "{% nosuch %}", "{# x", "{{ (1 }}", "{% break %}", "{% set dict.a = 1 %}",
    "{% for a, b in [1] %}{% endfor %}", "{% set a, b = [1] %}", "{{ loop }}", "{% include 'x' %}", "{% macro m(a) %}{{ a.b.c }}{% endmacro %}{{ m(1) }}",
]


def language(environment):
    def result(source):
        try:
            return environment.from_string(source).render(**VARIABLES)
        except Exception:
            return None
    sources = ["{{ " + e.strip() + " }}" for e in EXPRESSIONS if e.strip()] + STATEMENTS
    results = {source: result(source) for source in sources}
    print(f"{len(results)} expressions and statements, {list(results.values()).count(None)} of them errors")
    return {"variables": VARIABLES, "results": results}


class Today(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 25)


def main():
    folder = pathlib.Path(__file__).resolve().parents[1] / "tests" / "golden"
    templates = {file.stem: file.read_text() for file in sorted((folder / "chat_templates").glob("*.jinja"))}
    conversations = [{"messages": [message(role, content) for role, content in c]} for c in CONVERSATIONS] + MORE
    chat_template_utils.datetime = Today

    def render(template, conversation, prompt):
        try:
            messages = chat_template_utils._normalize_chat_messages(conversation["messages"])  # as apply_chat_template does
            others = {k: v for k, v in conversation.items() if k != "messages"}
            return chat_template_utils.render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt,
                                                             bos_token="<s>", eos_token="</s>", **others)[0][0]
        except Exception:
            return None

    rendered = {name: {"whole": [render(template, c, False) for c in conversations],
                       "prompts": [render(template, c, True) for c in conversations]} for name, template in templates.items()}
    for name, results in rendered.items():
        print(f"{name}: {len(conversations)} conversations, {results['whole'].count(None)} of them refused")

    def write(name, value):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")

    write("chat.json", {"conversations": conversations, "templates": rendered})
    write("chat_tokens.json", tokenise(templates, conversations, render))
    write("language.json", language(chat_template_utils._compile_jinja_template("").environment))


if __name__ == "__main__":
    main()
