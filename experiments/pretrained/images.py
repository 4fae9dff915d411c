"""Heads on frozen ImageNet networks: CIFAR-10 with 5,000 labels and the scenes, against softmax baselines.

    HETSNGP_DATA=~/data python experiments/pretrained/images.py       # images.json
    HETSNGP_DATA=~/data python experiments/pretrained/images.py --networks efficientnet-lite0 --tasks scenes

The networks are EfficientNet-Lite0 and -Lite2 (extra ``weights``). Features are computed once and kept in
``--features`` (runs/features), where `hetsngp train frozen` finds them too. Amplitudes are chosen by the
held-out NLL of one sngp head, and so are regularisation and preparation of the softmax; heads of a seed have
the same images. ``--onnx`` runs the network by ONNX Runtime (onnx, onnxscript, onnxruntime), whose features
differ from torch's by at most 2e-5 and take a third of the time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common import Predictions, flipped, paired, predict, softmax, summary
from torch import Tensor, nn

import hetsngp
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.sources import open_set
from hetsngp.frozen.features import FeatureSet
from hetsngp.pretrained.image_features import image_features
from hetsngp.pretrained.image_networks import PretrainedNetwork, pretrained_network

HERE = Path(__file__).parent
NETWORKS = ("efficientnet-lite0", "efficientnet-lite2")
# (task, labels of training and held-out images); test labels are always the true ones.
TASKS = {
    "cifar10": ("cifar10", "as given"),
    "cifar10, 30 % flipped": ("cifar10", "flipped"),
    "cifar10n worse": ("cifar10", "cifar10n:worse"),
    "scenes": ("scenes", "as given"),
}
POOL, DRAWN_FROM, TRAINING, HELD_OUT = 10_000, 8_000, 5_000, 1_000
SCENES_TEST, SCENES_HELD_OUT = 400, 150
AMPLITUDES = (1.5, 3.0, 5.0)
KERNELS: dict[str, dict[str, Any]] = {"rbf": {}, "rbf+linear": {"kernel": "rbf+linear", "linear_share": 0.2}}
METHODS = ("deterministic", "sngp", "hetsngp")


# --- features ---------------------------------------------------------------------------------------------


def image_sets() -> dict[str, Any]:
    """Sets of images by name; "cifar10" are those from which seeds draw."""
    rows = np.sort(np.random.default_rng(0).permutation(50_000)[:POOL])
    cifar100 = open_set("cifar100", "test")
    return {
        "cifar10": open_set("cifar10", "train").take(rows),
        "cifar10n:worse": open_set("cifar10n:worse", "train").take(rows),
        "cifar10 test": open_set("cifar10", "test"),
        "cifar100": cifar100.take(np.arange(0, len(cifar100), 4)),
        "scenes": open_set("scenes", "test"),
        "imagenet": open_set(Path(os.environ["HETSNGP_DATA"]) / "imagenet_val2_224", "test"),
    }


def features(name: str, sets: dict[str, Any], folder: Path, *, onnx: bool) -> dict[str, FeatureSet]:
    network = pretrained_network(name)
    network = by_onnx(network) if onnx else network
    found = {}
    for each, images in sets.items():
        began = time.perf_counter()
        h = image_features(images, network, folder, batch_size=32)
        found[each] = FeatureSet(h, images.labels)
        print(f"{name}: {each}, {len(h)} images, {time.perf_counter() - began:.0f} s", flush=True)
    return found


def by_onnx(network: PretrainedNetwork) -> PretrainedNetwork:
    """The same network, run by ONNX Runtime; its weights, and so its identity, are those of torch's."""
    import io

    import onnxruntime

    example = torch.randn(2, 3, network.size, network.size)
    program = torch.onnx.export(
        network.network, (example,), dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    content = io.BytesIO()
    program.model_proto.SerializeToString()  # raises now where it cannot be serialised
    content.write(program.model_proto.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.enable_cpu_mem_arena = False
    session = onnxruntime.InferenceSession(content.getvalue(), options)
    name = session.get_inputs()[0].name
    inner = network.network

    class OnnxNetwork(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return inner.state_dict(*args, **kwargs)

        def parameters(self, recurse: bool = True) -> Any:
            return inner.parameters(recurse)

        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {name: x.contiguous().numpy()})[0])

    return PretrainedNetwork(network.name, OnnxNetwork(), network.size, network.mean, network.std)


# --- tasks ------------------------------------------------------------------------------------------------


def split(task: str, everything: dict[str, FeatureSet], seed: int) -> tuple[FeatureSet, FeatureSet]:
    """Training and held-out examples of a seed."""
    source, labels = TASKS[task]
    whole = everything[source]
    random = np.random.default_rng(seed)
    if source == "scenes":
        order = random.permutation(scenes_order(len(whole))[SCENES_TEST:])
        rows, others = order[SCENES_HELD_OUT:], order[:SCENES_HELD_OUT]
    else:
        order = random.permutation(DRAWN_FROM)
        rows, others = order[:TRAINING], order[TRAINING : TRAINING + HELD_OUT]
    y = whole.y
    if labels == "flipped":
        y = flipped(y, 0.3, 10, seed)
    elif labels != "as given":
        y = everything[labels].y
    return FeatureSet(whole.h[rows], y[rows]), FeatureSet(whole.h[others], y[others])


def scenes_order(count: int) -> np.ndarray:
    """Order of the scenes, whose first ones are the test images of every seed."""
    return np.random.default_rng(100).permutation(count)


def evaluation_sets(task: str, everything: dict[str, FeatureSet]) -> dict[str, FeatureSet]:
    """Test examples, "id", and OOD sets."""
    if TASKS[task][0] == "scenes":
        scenes = everything["scenes"]
        rows = scenes_order(len(scenes))[:SCENES_TEST]
        test = FeatureSet(scenes.h[rows], scenes.y[rows])
        return {"id": test, **{name: everything[name] for name in ("cifar10 test", "cifar100", "imagenet")}}
    return {
        "id": everything["cifar10 test"],
        **{name: everything[name] for name in ("cifar100", "scenes", "imagenet")},
    }


def fit(
    train: FeatureSet, held_out: FeatureSet, method: str, seed: int, classes: int, options: dict[str, Any]
) -> tuple[hetsngp.Classifier, float]:
    """A head by fit_head and its CPU seconds."""
    network = nn.Linear(train.h.shape[1], classes)  # the features are there: any of that width will do
    model = hetsngp.convert(network, "deterministic", train.h[:2], freeze=True, normalization="power")
    given = options if method != "deterministic" else {}
    began = time.process_time()
    hetsngp.fit_head(model, train, held_out, seed=seed, progress=False, method=method, **given)
    return model, time.process_time() - began


def run_task(task: str, everything: dict[str, FeatureSet], seeds: list[int]) -> dict[str, Any]:
    classes = 5 if TASKS[task][0] == "scenes" else 10
    sets = evaluation_sets(task, everything)
    tried = []
    train, held_out = split(task, everything, seeds[0])
    for (kernel, options), amplitude in itertools.product(KERNELS.items(), AMPLITUDES):
        given = {**options, "amplitude": amplitude}
        model, _ = fit(train, held_out, "sngp", seeds[0], classes, given)
        tried.append({"kernel": kernel, "amplitude": amplitude, "nll": round(model.calibration["nll"], 4)})
        print(task, tried[-1], flush=True)
    chosen = {k: min((t for t in tried if t["kernel"] == k), key=lambda t: t["nll"]) for k in KERNELS}
    runs: dict[str, list[Predictions]] = {}
    for seed in seeds:
        train, held_out = split(task, everything, seed)
        found = softmax(train, held_out, sets, strengths=(0.001, 0.003, 0.01, 0.03))
        runs.setdefault("softmax", []).append(found)
        for method in METHODS:
            for kernel in ("rbf",) if method == "deterministic" else KERNELS:
                given = {**KERNELS[kernel], "amplitude": chosen[kernel]["amplitude"]}
                model, cpu = fit(train, held_out, method, seed, classes, given)
                name = method if kernel == "rbf" else f"{method}, linear"
                report = {"temperature": float(model.temperature), "scale": model.calibration["scale"]}
                found = predict(model, sets, cpu=round(cpu, 1), **report)
                runs.setdefault(name, []).append(found)
                shown = {k: round(v, 4) for k, v in found.numbers().items() if k.count("/") == 0}
                print(f"{task}, seed {seed}, {name}: {shown}", flush=True)
    others = [name for name in sets if name != "id"]
    columns = {name: (name, "ood_score", "ood_score") for name in others}
    base = {
        f"{name} against {score}": (name, "ood_score", score)
        for name in others
        for score in ("msp", "energy", "mahalanobis", "relative mahalanobis", "knn")
    }
    return {
        "tried": tried,
        "chosen": chosen,
        "mean": {name: summary(each) for name, each in runs.items()},
        "less softmax": {
            name: paired(each, runs["softmax"], base) for name, each in runs.items() if name != "softmax"
        },
        "less deterministic": {
            name: paired(each, runs["deterministic"], columns)
            for name, each in runs.items()
            if name not in ("softmax", "deterministic")
        },
        "about": {name: [run.about for run in each] for name, each in runs.items()},
        "examples": {name: len(each) for name, each in sets.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--features", type=Path, default=Path("runs/features"))
    parser.add_argument("--out", type=Path, default=HERE / "images.json")
    parser.add_argument("--onnx", action="store_true")
    args = parser.parse_args()
    sets = image_sets()
    assert isinstance(sets["cifar10"], ImageArrays)
    results: dict[str, Any] = {}
    for network in args.networks:
        everything = features(network, sets, args.features, onnx=args.onnx)
        for task in args.tasks:
            results.setdefault(network, {})[task] = run_task(task, everything, args.seeds)
            common.write(args.out, {"seeds": args.seeds, "results": results})


if __name__ == "__main__":
    main()
