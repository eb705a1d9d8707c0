#!/usr/bin/env python3
"""Train a small model with --tensorboard, stop it, go back to an earlier checkpoint and resume; then read the event files with
the tensorboard package and compare them with metrics.jsonl.

  scripts/check_tensorboard.py [build/streambp]

Needs tensorboard (pip install tensorboard).
"""

import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile

from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import plugin_data_pb2


def main():
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    program = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/streambp").resolve()
    with tempfile.TemporaryDirectory() as directory:
        run = pathlib.Path(directory) / "run"
        train = lambda *options: subprocess.run([program, "train", *options, "--out", run], check=True, stdout=subprocess.DEVNULL)
        train(*"--layers 1 --hidden 32 --heads 2 --length 256 --steps 30 --eval-every 5 --checkpoint-every 10 --sample 20".split(),
              "--stop-after", "25", "--tensorboard")
        for step in ("step-000020", "step-000025"):  # steps 11 to 25 are computed again
            shutil.rmtree(run / step), shutil.rmtree(run / "training" / step)
        train("--resume")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        events = event_accumulator.EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        tags, compared = events.Tags(), 0
        for name in sorted({name for line in lines for name, value in line.items() if isinstance(value, (int, float)) and name != "step"}):
            expected = [(line["step"], line[name]) for line in lines if name in line]
            found = [(event.step, event.value) for event in events.Scalars(name)]
            assert [step for step, _ in found] == [step for step, _ in expected], (name, found, expected)
            assert all(math.isclose(a, b, rel_tol=1e-6) for (_, a), (_, b) in zip(found, expected)), name
            compared += len(found)
        samples = {line["step"]: line["sample"]["prompt"] + line["sample"]["text"] for line in lines if "sample" in line}
        found = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("sample")}
        assert samples.items() <= found.items(), (found, samples)  # TensorBoard drops scalars of repeated steps, not texts
        assert "train --layers 1" in events.Tensors("command")[0].tensor_proto.string_val[0].decode()
        metadata = events.SummaryMetadata("_hparams_/session_start_info").plugin_data
        session = plugin_data_pb2.HParamsPluginData.FromString(metadata.content).session_start_info
        assert session.hparams["--hidden"].number_value == 32 and session.hparams["--mode"].string_value == "stream"
        print(f"tensorboard reads {len(tags['scalars'])} metrics with {compared} values, {len(session.hparams)} hyperparameters and a sample")


if __name__ == "__main__":
    main()
