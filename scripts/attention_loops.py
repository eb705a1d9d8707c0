#!/usr/bin/env python3
"""The loops of the attention kernels, from their machine code: what a tile costs, and what bounds it.

    cuobjdump -sass kernels.o | scripts/attention_loops.py

Counts the instructions that a warp executes for a tile without masked or missing rows, and from them the cycles of a
block (four warps, one on each quarter of an SM): issue takes one cycle per instruction and quarter; tensor cores 8 per
product of 16 x 8 x 16 on an A100, and at least 4 on an H100 and later; ldmatrix 4 for its 512 bytes, in memory that the
four warps share. The longest is the bound, in FLOPs per cycle and SM.
"""
import re
import sys
from collections import Counter

TENSOR_CYCLES = {"sm_80": 8, "sm_86": 16, "sm_89": 16}  # GeForce: half the rate with sums in float32; others: 4
SHARED_CYCLES, WARPS = 4, 4


def functions(lines):
    """Yields (architecture, name, [(address, instruction)])."""
    architecture, name, code = "", None, []
    for line in lines:
        if match := re.search(r"^\s*arch = (\S+)", line):
            architecture = match[1]
        elif match := re.search(r"Function : (\S+)", line):
            if code:
                yield architecture, name, code
            name, code = match[1], []
        elif match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line):
            code.append((int(match[1], 16), match[2]))
    if code:
        yield architecture, name, code


def target(instruction):
    match = re.search(r"\bBRA\b.*0x([0-9a-f]+)", instruction)
    return int(match[1], 16) if match else None


def holds(code, *names):
    return any(name in instruction for _, instruction in code for name in names)


def tile_loop(code):
    """The shortest loop with the most products."""
    loops = []
    for address, instruction in code:
        begin = target(instruction)
        if begin is not None and begin < address:
            body = [entry for entry in code if begin <= entry[0] <= address]
            loops.append((-sum("HMMA" in i for _, i in body), len(body), body))
    return min(loops, key=lambda loop: loop[:2])[2] if loops else []


def whole_tile(body):
    """Without what a branch leaves out: of two ways to load a tile the shorter one, and all other optional parts."""
    place = {address: i for i, (address, _) in enumerate(body)}
    left_out = set()
    for i, (_, instruction) in enumerate(body):
        end = place.get(target(instruction))
        if end is None or end <= i or not instruction.startswith("@"):
            continue
        part = body[i + 1:end]
        if not part or holds(part, "HMMA", "BAR"):
            continue
        join = place.get(target(part[-1][1])) if part[-1][1].startswith("BRA") else None
        if holds(part, "LDGSTS"):
            if join is not None and join > end:
                left_out.update(range(end, join) if join - end > len(part) else range(i + 1, end))
        else:
            left_out.update(range(i + 1, end))
    return [entry for i, entry in enumerate(body) if i not in left_out]


def main():
    rows = []
    for architecture, name, code in functions(sys.stdin):
        kernel = re.search(r"(flash_\w*?kernel)ILi(\d+)ELb([01])E", name)
        loop = whole_tile(tile_loop(code)) if kernel else []
        if not loop:
            continue
        counts = Counter(re.sub(r"^@!?U?P\d+\s+", "", i).split()[0].split(".")[0] for _, i in loop)
        cycles = {"issue": len(loop), "tensor": TENSOR_CYCLES.get(architecture, 4) * counts["HMMA"],
                  "shared": SHARED_CYCLES * WARPS * counts["LDSM"]}
        capped = " capped" if kernel[3] == "1" else ""
        rows.append((architecture, kernel[1] + capped, int(kernel[2]), counts["HMMA"], cycles))
    if not rows:
        sys.exit("attention_loops.py: no attention kernel in the input; pipe the output of cuobjdump -sass into it")
    print(f"{'GPU':8} {'attention kernel':27} {'head':>4} {'issue':>6} {'tensor':>6} {'shared':>6}  bound")
    for architecture, kernel, head, products, cycles in sorted(rows, key=lambda row: row[:3]):
        bound = max(cycles, key=cycles.get)
        flops = 2 * 16 * 8 * 16 * products * WARPS / cycles[bound]
        print(f"{architecture:8} {kernel:27} {head:4} {cycles['issue']:6} {cycles['tensor']:6} {cycles['shared']:6}  "
              f"{bound}, {flops:.0f} FLOPs")


if __name__ == "__main__":
    main()
