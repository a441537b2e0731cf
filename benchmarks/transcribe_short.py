"""Clips per second: omni against faster-whisper, int8, file by file, on the same weights.

Both decode the same files with the same language, greedily and with timestamps, each in a process
of its own, in turn; imports and loading are counted in neither. Words are compared with the
references after Whisper's normaliser; with `--exact` the share of words that differ from
full-window float32 decoding stands beside them.

    python benchmarks/transcribe_short.py recordings.jsonl --peer-model CT2_FOLDER

The last line is one JSON document.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import soundfile

RATE_HZ = 16_000


def make_set(manifest, folder, seconds, seed=0):
    """Distinct clips: each source again with another gain and another start, until it is enough."""
    import torch
    import torchaudio

    rng = random.Random(seed)
    sources = []
    for row in map(json.loads, manifest.read_text().splitlines()):
        samples, rate = soundfile.read(manifest.parent / row["audio_filepath"], dtype="float32")
        mono = torch.from_numpy(samples if samples.ndim == 1 else samples.mean(1))
        sources.append((row, torchaudio.functional.resample(mono, rate, RATE_HZ)))
    rows, total_s, turn = [], 0.0, 0
    while total_s < seconds:
        for row, samples in sources:
            start = rng.randrange(0, 1600) if turn else 0
            gain = rng.uniform(0.3, 1.1) if turn else 1.0
            cut = (samples[start:] * gain).clamp(-1, 1)
            name = f"{row['id']}-{turn}.wav"
            soundfile.write(folder / name, cut.numpy(), RATE_HZ)
            rows.append({"audio_filepath": name, "id": name, "text": row.get("text")})
            total_s += len(cut) / RATE_HZ
        turn += 1
    lines = [json.dumps({k: v for k, v in r.items() if v is not None}) for r in rows]
    (folder / "m.jsonl").write_text("\n".join(lines))
    return rows, total_s


def run_omni(folder, dtype, full=False):
    """Seconds for all clips and the texts; warm, models loaded."""
    import time

    from omnicli import models
    from omnicli.config import ModelChoice, RunConfig, Task
    from omnicli.execution.families.cascade import hearing
    from omnicli.job import run_job

    if full:
        hearing.MARGIN_S = 2 * hearing.WINDOW_S

    def once(name, inputs):
        config = RunConfig(
            inputs=inputs,
            output_dir=folder / name,
            task=Task(command="transcribe", language="en"),
            models=ModelChoice(dtype=dtype, cache=models.cache_dir(os.environ)),
            writers=(),
        )
        began = []

        def first(event):
            began.append(time.perf_counter()) if event["event"] == "stage" else None

        run_job(config, listeners=(first,), check=lambda: None)
        return time.perf_counter() - began[0]

    once(f"warm-{time.time_ns()}", (str(folder / "warm.jsonl"),))
    name = f"out-{time.time_ns()}"
    seconds = once(name, (str(folder / "m.jsonl"),))
    lines = map(json.loads, (folder / name / "results.jsonl").read_text().splitlines())
    return seconds, {line["id"]: line["pred_text"] for line in lines}


def run_peer(folder, compute_type, model, threads):
    """faster-whisper, file by file."""
    import time

    from faster_whisper import WhisperModel

    peer = WhisperModel(str(model), device="cpu", compute_type=compute_type, cpu_threads=threads)

    def once(rows):
        texts, start = {}, time.perf_counter()
        for row in rows:
            segments, _ = peer.transcribe(
                str(folder / row["audio_filepath"]), language="en", beam_size=1
            )
            texts[row["id"]] = " ".join(s.text.strip() for s in segments)
        return time.perf_counter() - start, texts

    rows = [json.loads(x) for x in (folder / "m.jsonl").read_text().splitlines()]
    once(rows[:3])
    return once(rows)


def child(kind, folder, *args):
    """Run one side in a process of its own."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    command = [sys.executable, __file__, "--child", kind, str(folder), *map(str, args)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


def error_rate(references, texts):
    """Word error rate after Whisper's normaliser."""
    import jiwer
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normal = EnglishTextNormalizer({})
    names = sorted(references)
    return jiwer.wer([normal(references[n]) for n in names], [normal(texts[n]) for n in names])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--peer-model", type=Path, required=True, help="CTranslate2 folder")
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows, total_s = make_set(args.manifest, folder, args.seconds)
        (folder / "warm.jsonl").write_text("\n".join(json.dumps(r) for r in rows[:6]))
        references = {r["id"]: r["text"] for r in rows if r["text"]}
        exact = child("omni-full", folder, "float32")[1] if args.exact else {}
        ours, theirs = [], []
        for _ in range(args.turns):
            ours.append(child("omni", folder, "auto"))
            theirs.append(child("peer", folder, "int8", args.peer_model, os.cpu_count()))
        ratios = [t[0] / o[0] for o, t in zip(ours, theirs, strict=True)]
        texts = ours[0][1]
        told = {
            "benchmark": "transcribe_short",
            "clips": len(rows),
            "audio_s": round(total_s, 1),
            "omni_s": [round(o[0], 2) for o in ours],
            "peer_s": [round(t[0], 2) for t in theirs],
            "ratio": round(median(ratios), 2),
            "ratios": [round(r, 2) for r in ratios],
            "omni_x_real_time": round(total_s / median(o[0] for o in ours), 1),
            "omni_wer": round(error_rate(references, texts), 4),
            "peer_wer": round(error_rate(references, theirs[0][1]), 4),
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        }
        if exact:
            told["full_window_float32_wer"] = round(error_rate(references, exact), 4)
            told["words_changed"] = round(error_rate(exact, texts), 4)
        print(json.dumps(told))


def as_child():
    kind, folder, *rest = sys.argv[2:]
    if kind == "peer":
        compute_type, model, threads = rest
        made = run_peer(Path(folder), compute_type, Path(model), int(threads))
    else:
        made = run_omni(Path(folder), rest[0], full=kind == "omni-full")
    print(json.dumps(made))


if __name__ == "__main__":
    as_child() if sys.argv[1] == "--child" else main()
