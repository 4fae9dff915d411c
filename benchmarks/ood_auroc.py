"""Two versions of the package on the same networks: is any OOD AUROC lost by the way predictions integrate?

    HETSNGP_DATA=<data folder> python benchmarks/ood_auroc.py --before PATH/src --out benchmarks/results

WRN-16-4 on CIFAR-100, 20 epochs, trained by the version before (experiments/defaults/images.py: ``direction``
is hetsngp). Both versions then fit and calibrate the default posterior on the same features of the same
network, and predict test images, CIFAR-10 (near) and scenes (far). A GPU takes two minutes a seed. For a CPU
``--set width=2 epochs=5 batch=256 lr=0.1 per_class=200 held_out=2000`` makes a small network.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from split import Gaussian, Sizes, gaussian_of, reference
from torch import Tensor, nn
from training_loss import package, start_workers, work, write

sys.path.append(str(Path(__file__).parents[1] / "experiments" / "defaults"))

CONFIGS = {"sngp": "sngp", "hetsngp": "direction"}
SHOWN = ("accuracy", "nll", "ece", "near_model_uncertainty", "far_model_uncertainty")
# Sizes of a reference: a GPU takes a tenth of a second for an input, two cores a second.
REFERENCE = (2**6, 2**12, 16, 2**16)
_data: dict[str, Any] = {}


def _images(job: dict[str, Any]) -> tuple[Any, Any]:
    """Module of the experiment, and its data on the device, read once."""
    import images

    if not _data:
        settings = images.SMOKE if job["smoke"] else dataclasses.replace(images.Settings(), **job["settings"])
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        root = Path(os.environ["HETSNGP_DATA"])
        _data.update(settings=settings, data=images.load(root, settings, device))
    return images, _data


def train(job: dict[str, Any]) -> None:
    """Train a network, and save its head and its features."""
    import hetsngp

    images, have = _images(job)
    data = have["data"]
    trained, _ = images.train(CONFIGS[job["method"]], job["seed"], data, have["settings"], False)
    parts = {"train": data.train[:, images.PAD : -images.PAD, images.PAD : -images.PAD]}
    parts |= {"held_out": data.held_out, **data.out}
    torch.save({name: images.features(trained, part).cpu() for name, part in parts.items()}, job["h"])
    model = hetsngp.Classifier(nn.Identity(), trained.head, num_features=trained.num_features)
    torch.save(model.state_dict(), job["weights"])


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Fit the posterior and measure; of some inputs, the model uncertainty and its reference too."""
    import hetsngp

    images, have = _images(job)
    data, settings = have["data"], have["settings"]
    h = {name: part.to(data.train.device) for name, part in torch.load(job["h"]).items()}
    backbone = nn.Identity()
    backbone.num_features = h["train"].shape[1]  # type: ignore[assignment]
    method, options = images.CONFIGS[CONFIGS[job["method"]]]
    options = {**options, "random_features": settings.random_features, "dataset_size": len(data.train)}
    model = hetsngp.build(method, backbone, images.CLASSES, **options)
    keys = model.load_state_dict(torch.load(job["weights"], map_location="cpu"), strict=False)
    other = [key for key in (*keys.missing_keys, *keys.unexpected_keys) if ".posterior." not in key]
    if other:  # the posterior is fitted below
        raise RuntimeError(f"the versions do not have these in common: {', '.join(other)}")
    model = model.to(data.train.device).eval()
    with other_draws(job["draws"]):
        found = images.evaluate(model, h, data, settings, 2000)
        some = {name: evenly(h[name], job["inputs"]) for name in ("test", "near", "far")}
        values = {name: model.predict(x).model_uncertainty.tolist() for name, x in some.items() if len(x)}
    out: dict[str, Any] = {name: value for name, value in found.items() if isinstance(value, float)}
    if job["inputs"]:
        out["values"] = values
    if job["reference"]:
        for name, x in some.items():
            exact = reference(Gaussian(*gaussian_of(model, x)), Sizes(*REFERENCE), str(x.device))
            out.setdefault("reference", {})[name] = exact.model.tolist()
            out.setdefault("reference error", {})[name] = float(exact.error.square().mean().sqrt())
    return out


def evenly(x: Tensor, count: int) -> Tensor:
    """``count`` rows, equally far apart."""
    return x[torch.linspace(0, len(x) - 1, count, device=x.device).long()]


def against_reference(row: dict[str, Any]) -> str:
    """AUROC of the same few inputs by each version and by the reference, and the errors of each version."""
    from hetsngp import metrics

    exact = {name: torch.tensor(values) for name, values in row["after"]["reference"].items()}
    found = {name: row[name]["values"] for name in row if isinstance(row[name], dict)}
    lines = []
    for name, values in {**found, "reference": exact}.items():
        given = {part: torch.as_tensor(of) for part, of in values.items()}
        error = torch.cat([given[part] - exact[part] for part in exact])
        cells = [f"{part} {metrics.auroc(given['test'], given[part]):.4f}" for part in ("near", "far")]
        bias = ", ".join(f"{part} {float((given[part] - exact[part]).mean()):+.4f}" for part in exact)
        lines.append(
            f"{name}: {', '.join(cells)}; rms {float(error.square().mean().sqrt()):.4f}, bias {bias}"
        )
    return "\n".join(lines)


@contextlib.contextmanager
def other_draws(draws: int | None) -> Iterator[None]:
    """Another number of correlated draws than the package's, if one is given."""
    from hetsngp.functional import link

    names = ("FEWEST_DRAWS", "MOST_DRAWS") if draws else ()
    before = {name: getattr(link, name) for name in names}
    try:
        for name in names:
            setattr(link, name, draws)
        yield
    finally:
        for name, value in before.items():
            setattr(link, name, value)


def answer(job: dict[str, Any]) -> Any:
    """Do one job of a worker."""
    jobs = {"train": train, "measure": measure}
    return package() if job["what"] == "package" else jobs[job["what"]](job)


def table(result: dict[str, Any]) -> str:
    versions = [name for name in result["rows"][0] if name not in ("method", "seed")]
    heads = ["method", "seed", *(f"{name}: {v}" for name in SHOWN for v in versions)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in result["rows"]:
        cells = [f"{row[v][name]:.4f}" for name in SHOWN for v in versions]
        lines.append("| " + " | ".join([row["method"], str(row["seed"]), *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", help="folder of the version that trains, and is measured beside this one")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for ood_auroc.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--draws",
        type=int,
        nargs="*",
        default=[],
        help="other numbers of correlated draws too",
    )
    parser.add_argument(
        "--reference",
        type=int,
        default=0,
        metavar="INPUTS",
        help="of each set, by the reference of split.py too",
    )
    parser.add_argument("--methods", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="settings of images.py")
    parser.add_argument("--smoke", action="store_true", help="a few images, one epoch: does it run?")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(answer)
        return
    workers, packages = start_workers(args.before, __file__)
    settings = {name: json.loads(value) for name, _, value in (item.partition("=") for item in args.set)}
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "packages": packages,
        "settings": settings,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for method in args.methods:
                job = {"method": method, "seed": seed, "smoke": args.smoke, "settings": settings}
                job |= {"h": f"{folder}/h.pt", "weights": f"{folder}/weights.pt"}
                next(iter(workers.values())).ask(what="train", **job)
                asked = {
                    **job,
                    "what": "measure",
                    "draws": None,
                    "inputs": args.reference,
                    "reference": False,
                }
                row = {
                    v: worker.ask(**asked | {"reference": v == "after" and args.reference > 0})
                    for v, worker in workers.items()
                }
                for draws in args.draws:
                    row[f"{draws} draws"] = workers["after"].ask(**asked | {"draws": draws})
                result["rows"].append({"method": method, "seed": seed, **row})
                write(args.out / "ood_auroc.json", result)
                print(table({**result, "rows": result["rows"][-1:]}).splitlines()[-1], flush=True)
                if args.reference:
                    print(against_reference(row), flush=True)
    print(table(result))
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
