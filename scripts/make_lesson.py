#!/usr/bin/env python3
"""Put the recorded step of a small model into docs/lesson.html, and take the README's picture, a frame of the page that
plays a step of Qwen3-8B. Run it after a change of the walk or of pages/.

  scripts/make_lesson.py [--program build/streambp] [--no-picture]

The picture needs Chromium (apt-get install chromium).
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMALL = "--family llama --layers 6 --hidden 256 --heads 4 --mlp 704 --vocab 8192 --device cuda --dtype f32 --length 16384".split()
LARGE = "qwen3-8b --length 100000 --memory 80GiB --optimizer adamw-bf16".split()
DATA = re.compile(r'(<script type="?application/json"? id="?data"?>)(.*?)(</script>)', re.DOTALL)


def record(program, arguments, page):
    subprocess.run([program, "plan", *arguments, "--timeline", page], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return json.loads(DATA.search(page.read_text()).group(2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/streambp", type=pathlib.Path)
    parser.add_argument("--no-picture", action="store_true")
    args = parser.parse_args()
    program = args.program.resolve()
    with tempfile.TemporaryDirectory() as directory:
        page = pathlib.Path(directory) / "step.html"
        lesson = ROOT / "docs/lesson.html"
        data = record(program, SMALL, page)
        del data["title"]  # the lesson has its own
        data["command"] = "streambp plan " + " ".join(SMALL)
        recorded = json.dumps(data, separators=(",", ":"), sort_keys=True).replace("<", "\\u003c")
        lesson.write_text(DATA.sub(lambda found: found[1] + recorded + found[3], lesson.read_text()))
        if args.no_picture:
            return
        browser = shutil.which("chromium") or sys.exit("make_lesson.py: no chromium; apt-get install chromium, or --no-picture")
        record(program, LARGE, page)
        subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1240,1320",
                        f"--screenshot={ROOT / 'docs/step.png'}", f"{page.as_uri()}#2:0.62"], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
