#!/usr/bin/env python3
"""Put the recorded step of a small model into docs/lesson.html. Run it after a change of the walk; a test says when.

  scripts/make_lesson.py [build/streambp]
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = "--family llama --layers 6 --hidden 256 --heads 4 --mlp 704 --vocab 8192 --device cuda --dtype f32 --length 16384"
DATA = re.compile(r'(<script type="?application/json"? id="?data"?>)(.*?)(</script>)', re.DOTALL)


def main():
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    program = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build/streambp"
    lesson = ROOT / "docs/lesson.html"
    with tempfile.TemporaryDirectory() as directory:
        page = pathlib.Path(directory) / "step.html"
        subprocess.run([program, "plan", *MODEL.split(), "--timeline", page], check=True, stdout=subprocess.DEVNULL)
        data = json.loads(DATA.search(page.read_text()).group(2))
    del data["title"]  # the lesson has its own
    del data["walks"][4], data["walks"][2]  # chunk by chunk, and checkpointing with a chunked loss
    data["command"] = f"streambp plan {MODEL}"
    text = json.dumps(data, separators=(",", ":"), sort_keys=True).replace("<", "\\u003c")
    lesson.write_text(DATA.sub(lambda found: found[1] + text + found[3], lesson.read_text()))


if __name__ == "__main__":
    main()
