#!/usr/bin/env python3
"""Writes three small data sets of questions about fixed answers, and held-out files that ask in other words:
DIR/NAME.jsonl and DIR/NAME-held-out.jsonl. docs/log.md says what they showed about the order of packs.

    scripts/make_packing_sets.py DIR
"""

import json
import random
import sys

KINDS = "colour song river recipe planet letter garden story".split()
ITEMS = (
    "amber basil cedar delta ember fjord grove heron ivory jolly koala lemon maple north olive pearl quilt raven "
    "stone tulip umber velvet willow yarn zebra"
).split()
QUESTIONS = ["What about {}?", "Tell me about {}.", "Say something on {}, please."]
OTHER_QUESTIONS = ["And {}?", "I ask for {}."]


def by_kind(kind, item):
    """From 2 to 30 words; each kind has a length of its own."""
    return 2 + 4 * KINDS.index(kind)


def by_item(kind, item):
    """The same lengths, in all kinds."""
    return 2 + 4 * ((KINDS.index(kind) * 3 + ITEMS.index(item) * 5) % 8)


def few_long(kind, item):
    """One answer of 64 has 100 words."""
    return 100 if kind == "story" and item == ITEMS[0] else 3 + KINDS.index(kind) % 3


def answer(kind, item, words):
    chosen = random.Random(f"{kind} {item}")
    return f" The {kind} of {item}: " + " ".join(chosen.choice(ITEMS) for _ in range(words)) + "."


def write(path, seed, length, items, count, questions):
    random.seed(seed)
    with open(path, "w", encoding="utf-8") as out:
        for i in range(count):
            kind, item = KINDS[i % 8], ITEMS[random.randrange(items)]
            prompt = random.choice(questions).format(f"the {kind} of {item}")
            line = {"prompt": prompt, "completion": answer(kind, item, length(kind, item))}
            out.write(json.dumps(line) + "\n")


if len(sys.argv) != 2:
    sys.exit(__doc__)
for name, length, items, count in [
    ("correlated", by_kind, 6, 96),
    ("uncorrelated", by_item, 6, 96),
    ("few-long", few_long, 8, 200),
]:
    write(f"{sys.argv[1]}/{name}.jsonl", f"{name} False", length, items, count, QUESTIONS)
    write(f"{sys.argv[1]}/{name}-held-out.jsonl", f"{name} True", length, items, count, OTHER_QUESTIONS)
