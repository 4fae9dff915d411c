"""Two moons against the libraries a user would pick instead: CPU seconds to train and predict, OOD AUROC.

    OMP_NUM_THREADS=1 PYTHONPATH=src .peers/bin/python benchmarks/peers.py --out benchmarks/results

About 3 minutes of CPU a seed. Works with none of the peers installed: a missing one is listed with its
command. All of them in one scratch environment, Python 3.11 (--dry-run first: no nvidia package may appear):

    python3 -m venv .peers
    P=".peers/bin/pip install -c constraints.txt torch==2.13.0"
    $P numpy scikit-learn safetensors lightning torchvision rich
    $P gpytorch==1.15.2 laplace-torch==0.3 torch-uncertainty==0.13.0 pytorch-ood==0.4.0
    $P omegaconf==2.4.0 'jsonargparse[signatures]==4.53.0' timm h5py==3.16.0 kornia==0.9.0 \
       ema-pytorch==0.8.3 uncertainty-toolbox==0.1.1 segmentation-models-pytorch==0.6.0 \
       vector-quantize-pytorch==1.32.0 vbll==0.4.9
    .peers/bin/pip install --no-deps --ignore-requires-python lightning-uq-box==0.4.0 probly==0.9.1
    .peers/bin/python tools/torchvision_hook.py     # for a CUDA torchvision beside a CPU torch

lightning-uq-box comes without its dependencies because it pins curvlinops 2.0.0 where laplace-torch 0.3 wants
3.0.1. It asks for Python 3.12 but runs on 3.11. probly's package is a SyntaxError before 3.12; its file of
layers is not, and is loaded alone there.

The same for everyone: 1,000 training points with noise 0.1, the 4×128 residual MLP of `ResidualMLP` with its
fixed isometry, Adam at 1e-3, batches of 64 from one DataLoader, 100 epochs, one thread; 250 further points
for what a library does with held-out data. A one-epoch warm-up keeps imports and first calls out of the
times. Predicting is the median of three, in batches of 500 and all at once, and the table has the cheaper of
the two (the JSON both); those that write out a B×B covariance only get batches. What each pays for:

- ours: `train` (AdamW, cosine schedule), `fit_posterior`, `predict` (probabilities, both uncertainties and
  the score). No peer calibrates, so neither do the methods by their plain names; "calibrated" also gives
  `fit_posterior` the held-out points.
- lightning-uq-box SNGP: a Lightning trainer, its logger, progress bar and checkpoints switched off; ΦᵀΦ at
  every step. Only validation computes the covariance, so there is one validation pass, after the last epoch.
  `predict_step` writes out a B×B covariance.
- probly SNGP: what its `sngp()` puts together (norm multiplier 0.95 for an MLP) in a plain loop; ΦᵀΦ at every
  step, the precision reset at every epoch as its documentation asks; 10 samples of the logits, its default.
- probly heteroscedastic: rank 6 like ours, one noise sample a step (its default). 50 samples for a
  prediction: inside the layer, the cheapest it offers, and as 50 passes of the network, its `representer`.
- gpytorch SV-DKL: a GP a class with 64 inducing points on the features; 8 and 16 likelihood samples as in its
  tutorial. The tutorial's grid, a GP for each of the 128 features, took 17 times longer an epoch.
- laplace-torch: a plain loop, then a last-layer Kronecker fit and the prior precision by marginal likelihood.
  The function variance runs the network a second time: no public call returns it with the probabilities.
- torch-uncertainty: five networks as one ensemble, in its trainer, switched off as above.
- pytorch-ood: a plain loop; MSP reads the logits, KNN (k = 50, its default) looks up normalised features.

Ratios are to our hetsngp and sngp at the same seed, medians over seeds: above 1, ours is cheaper.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.fitting.loop import train
from hetsngp.nn.backbones import ResidualMLP

COUNT, HELD_OUT, TEST, PREDICT, BLOB = 1000, 250, 2000, 10_000, 200
WIDTH, DEPTH, LR, BATCH, PREDICT_BATCH = 128, 4, 1e-3, 64, 500  # 500: the best for gpytorch, uq-box
BLOBS = {"near": (2.5, -1.75), "far": (6.0, 6.0), "side": (-5.0, 4.0)}
REFERENCES = ("hetsngp", "sngp")

Predict = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x (B, 2) → probabilities (B, 2), OOD score (B,), higher = less like the training data."""


def moons(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = make_moons(count, noise=0.1, random_state=seed)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


@dataclass(frozen=True)
class Data:
    train: TensorDataset
    held_out: TensorDataset

    @property
    def loader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=BATCH, shuffle=True)


def feature_network() -> nn.Sequential:
    """`ResidualMLP` as a chain of layers, the isometry a frozen Linear: peers look for the first layer."""
    backbone = ResidualMLP(2, width=WIDTH, depth=DEPTH)
    embedding = nn.Linear(2, WIDTH, bias=False).requires_grad_(False)
    embedding.weight.copy_(backbone.isometry)
    return nn.Sequential(embedding, *backbone.blocks)


def classifier() -> nn.Sequential:
    return nn.Sequential(*feature_network(), nn.Linear(WIDTH, 2))


def plain_loop(
    module: nn.Module,
    loader: DataLoader,
    epochs: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    before_epoch: Callable[[], None] = lambda: None,
) -> None:
    """Adam on ``loss(x, y)``; leaves the module in eval mode."""
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=LR)
    module.train()
    for _ in range(epochs):
        before_epoch()
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss(x, y).backward()
            optimizer.step()
    module.eval()


def entropy(probs: Tensor) -> Tensor:
    return -torch.xlogy(probs, probs).sum(-1)


# --- ours -----------------------------------------------------------------------------------------------


def ours(method: str, calibrated: bool = False) -> Callable[[Data, int], dict[str, Predict]]:
    def fit(data: Data, epochs: int) -> dict[str, Predict]:
        backbone = ResidualMLP(2, width=WIDTH, depth=DEPTH)
        model = hetsngp.build(method, backbone, num_classes=2, dataset_size=len(data.train))
        train(model, data.loader, epochs=epochs, lr=LR)
        held_out = DataLoader(data.held_out, batch_size=HELD_OUT)
        hetsngp.fit_posterior(model, data.loader, calibration=held_out if calibrated else None)

        def predict(x: Tensor) -> tuple[Tensor, Tensor]:
            prediction = model.predict(x)
            return prediction.probs, prediction.ood_score

        return {"ood_score": predict}

    return fit


# --- peers: each imports its library itself and returns one `Predict` for each score ----------------------


def trainer_options(epochs: int) -> dict[str, Any]:
    """A Lightning trainer that does nothing but train, and validates once, at the end."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": epochs,
        "check_val_every_n_epoch": epochs,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def lightning_uq_box_sngp(data: Data, epochs: int) -> dict[str, Predict]:
    from lightning import LightningDataModule, Trainer
    from lightning_uq_box.datamodules.utils import collate_fn_tensordataset
    from lightning_uq_box.uq_methods import SNGPClassification

    class Moons(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(data.train, batch_size=BATCH, shuffle=True, collate_fn=collate_fn_tensordataset)

        def val_dataloader(self) -> DataLoader:
            return DataLoader(data.held_out, batch_size=HELD_OUT, collate_fn=collate_fn_tensordataset)

    model = SNGPClassification(
        feature_network(),
        loss_fn=nn.CrossEntropyLoss(),
        num_targets=2,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=LR),
    )
    Trainer(**trainer_options(epochs)).fit(model, datamodule=Moons())
    model.eval()

    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        out = model.predict_step(x)
        return out["pred"].softmax(-1), out["epistemic_uct"]

    return {"std": predict}


def probly_layers() -> Any:
    try:
        from probly.layers import torch as layers
    except SyntaxError:  # Python 3.11: the package is written in 3.12's syntax, this file of it is not
        package = importlib.util.find_spec("probly")
        path = Path(package.submodule_search_locations[0]) / "layers" / "torch.py"
        spec = importlib.util.spec_from_file_location("probly_layers_torch", path)
        layers = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(layers)
    return layers


def probly_sngp(data: Data, epochs: int) -> dict[str, Predict]:
    layers = probly_layers()
    features = feature_network()
    for layer in features.modules():
        if isinstance(layer, nn.Linear):
            bound = layers._SpectralNormParametrization(layer.weight, norm_multiplier=0.95)
            nn.utils.parametrize.register_parametrization(layer, "weight", bound)
    head = layers.SNGPLayer(WIDTH, 2, num_random_features=1024)
    model = nn.Sequential(features, head)
    plain_loop(
        model,
        data.loader,
        epochs,
        lambda x, y: F.cross_entropy(model(x)[0], y),
        before_epoch=head.reset_precision_matrix,
    )
    with torch.no_grad():
        model(data.train.tensors[0][:1])  # the covariance is computed at the first call: part of the fit

    @torch.no_grad()
    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        logits, variance = model(x)
        samples = logits + variance.sqrt() * torch.randn(10, *logits.shape)
        return samples.softmax(-1).mean(0), variance[:, 0]

    return {"GP variance": predict}


def probly_heteroscedastic(data: Data, epochs: int) -> dict[str, Predict]:
    head = probly_layers().HeteroscedasticLayer(WIDTH, 2, num_factors=6)
    model = nn.Sequential(feature_network(), head)
    plain_loop(model, data.loader, epochs, lambda x, y: F.cross_entropy(model(x), y))

    @torch.no_grad()
    def in_layer(x: Tensor) -> tuple[Tensor, Tensor]:
        head.training_samples = 50
        probs = model(x).exp()
        return probs, entropy(probs)

    @torch.no_grad()
    def in_passes(x: Tensor) -> tuple[Tensor, Tensor]:
        head.training_samples = 1
        probs = torch.stack([model(x).softmax(-1) for _ in range(50)]).mean(0)
        return probs, entropy(probs)

    return {"entropy, 50 samples in the layer": in_layer, "entropy, 50 passes": in_passes}


def gpytorch_sv_dkl(data: Data, epochs: int) -> dict[str, Predict]:
    import gpytorch
    from gpytorch import distributions, kernels, likelihoods, means, variational

    class ClassGPs(gpytorch.models.ApproximateGP):
        def __init__(self, inducing: Tensor) -> None:
            each = torch.Size([2])  # a GP a class
            strategy = variational.VariationalStrategy(
                self,
                inducing.expand(2, -1, -1).clone(),
                variational.CholeskyVariationalDistribution(len(inducing), batch_shape=each),
                learn_inducing_locations=True,
            )
            super().__init__(variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=2))
            self.mean = means.ConstantMean(batch_shape=each)
            self.kernel = kernels.ScaleKernel(kernels.RBFKernel(batch_shape=each), batch_shape=each)

        def forward(self, h: Tensor) -> distributions.MultivariateNormal:
            return distributions.MultivariateNormal(self.mean(h), self.kernel(h))

    features, x = feature_network(), data.train.tensors[0]
    with torch.no_grad():
        gp = ClassGPs(features(x[torch.randperm(len(x))[:64]]))
    likelihood = likelihoods.SoftmaxLikelihood(num_classes=2, mixing_weights=False)
    model = nn.ModuleList([features, gp, likelihood])
    elbo = gpytorch.mlls.VariationalELBO(likelihood, gp, num_data=len(x))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with gpytorch.settings.num_likelihood_samples(8):
            return -elbo(gp(features(x)), y)

    plain_loop(model, data.loader, epochs, loss)

    @torch.no_grad()
    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        latent = gp(features(x))
        with gpytorch.settings.num_likelihood_samples(16):
            return likelihood(latent).probs.mean(0), latent.variance.sum(-1)

    return {"variance": predict}


def laplace_torch_last_layer(data: Data, epochs: int) -> dict[str, Predict]:
    from laplace import Laplace

    model = classifier()
    plain_loop(model, data.loader, epochs, lambda x, y: F.cross_entropy(model(x), y))
    posterior = Laplace(model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
    posterior.fit(data.loader)
    posterior.optimize_prior_precision(method="marglik")

    def variance(x: Tensor) -> tuple[Tensor, Tensor]:
        jacobians, _ = posterior.backend.last_layer_jacobians(x)
        return posterior(x), posterior.functional_variance(jacobians).diagonal(dim1=1, dim2=2).sum(-1)

    def probit(x: Tensor) -> tuple[Tensor, Tensor]:
        probs = posterior(x)
        return probs, entropy(probs)

    return {"function variance": variance, "probit entropy": probit}


def torch_uncertainty_ensemble(data: Data, epochs: int) -> dict[str, Predict]:
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.methods import deep_ensembles
    from torch_uncertainty.ood_criteria import MutualInformationCriterion
    from torch_uncertainty.routines import ClassificationRoutine
    from torch_uncertainty.transforms import RepeatTarget

    members = 5
    model = deep_ensembles([classifier() for _ in range(members)], task="classification")
    routine = ClassificationRoutine(
        num_classes=2,
        model=model,
        loss=nn.CrossEntropyLoss(),
        optim_recipe=torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=LR),
        is_ensemble=True,
        format_batch_fn=RepeatTarget(members),
    )
    TUTrainer(**trainer_options(epochs)).fit(routine, train_dataloaders=data.loader)
    model.eval()
    criterion = MutualInformationCriterion()

    @torch.no_grad()
    def predict(x: Tensor) -> tuple[Tensor, Tensor]:
        each = model(x).softmax(-1).view(members, len(x), 2).transpose(0, 1)
        return each.mean(1), criterion(each)

    return {"mutual information": predict}


def pytorch_ood_detectors(data: Data, epochs: int) -> dict[str, Predict]:
    from pytorch_ood.detector import KNN, MaxSoftmax

    features, head = feature_network(), nn.Linear(WIDTH, 2)
    model = nn.Sequential(features, head)
    plain_loop(model, data.loader, epochs, lambda x, y: F.cross_entropy(model(x), y))
    neighbours, softmax = KNN(features).to("cpu").fit(data.loader), MaxSoftmax(model)

    @torch.no_grad()
    def knn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = features(x)
        return head(h).softmax(-1), neighbours.predict_features(h)

    @torch.no_grad()
    def msp(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        return logits.softmax(-1), softmax.predict_logits(logits)

    return {"KNN": knn, "MSP": msp}


# --- measuring ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    fit: Callable[[Data, int], dict[str, Predict]]
    package: str = ""
    install: str = ""
    predict_batches: tuple[int, ...] = (PREDICT_BATCH, PREDICT)


NO_DEPS = "pip install --no-deps --ignore-requires-python"
ENTRIES = {
    "hetsngp": Entry(ours("hetsngp")),
    "sngp": Entry(ours("sngp")),
    "hetsngp calibrated": Entry(ours("hetsngp", calibrated=True)),
    "sngp calibrated": Entry(ours("sngp", calibrated=True)),
    "heteroscedastic": Entry(ours("heteroscedastic")),
    "deterministic": Entry(ours("deterministic")),
    "lightning-uq-box SNGP": Entry(
        lightning_uq_box_sngp,
        "lightning-uq-box",
        f"{NO_DEPS} lightning-uq-box==0.4.0, and what it imports: the head of benchmarks/peers.py",
        predict_batches=(PREDICT_BATCH,),
    ),
    "probly SNGP": Entry(probly_sngp, "probly", f"{NO_DEPS} probly==0.9.1"),
    "probly heteroscedastic": Entry(probly_heteroscedastic, "probly", f"{NO_DEPS} probly==0.9.1"),
    "gpytorch SV-DKL": Entry(gpytorch_sv_dkl, "gpytorch", "pip install gpytorch==1.15.2", (PREDICT_BATCH,)),
    "laplace-torch last layer": Entry(
        laplace_torch_last_layer, "laplace-torch", "pip install laplace-torch==0.3"
    ),
    "torch-uncertainty 5-ensemble": Entry(
        torch_uncertainty_ensemble,
        "torch-uncertainty",
        "pip install torch-uncertainty==0.13.0 lightning torchvision rich",
    ),
    "pytorch-ood": Entry(pytorch_ood_detectors, "pytorch-ood", "pip install pytorch-ood==0.4.0"),
}


def in_batches(predict: Predict, x: Tensor, size: int = PREDICT_BATCH) -> tuple[Tensor, Tensor]:
    probs, scores = zip(*(predict(part) for part in x.split(size)), strict=True)
    return torch.cat(probs), torch.cat(scores)


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def measure(entry: Entry, seed: int, epochs: int) -> dict[str, Any]:
    data = Data(TensorDataset(*moons(COUNT, seed)), TensorDataset(*moons(HELD_OUT, seed + 1000)))
    points, _ = moons(PREDICT, seed + 3000)
    torch.manual_seed(seed)
    seconds, predictors = cpu_seconds(lambda: entry.fit(data, epochs))
    scores = {}
    for name, predict in predictors.items():
        times = {}
        for size in entry.predict_batches:
            work = functools.partial(in_batches, predict, points, size)
            times[f"predict in batches of {size}"] = statistics.median(cpu_seconds(work)[0] for _ in range(3))
        scores[name] = {"predict": min(times.values()), **times, **quality(predict, seed)}
    return {"train": seconds, "scores": scores}


def quality(predict: Predict, seed: int) -> dict[str, float]:
    """Accuracy on new points, and AUROC of the score for each blob against them."""
    x, y = moons(TEST, seed + 2000)
    probs, inside = in_batches(predict, x)
    numbers = {"accuracy": float((probs.argmax(-1) == y).float().mean())}
    generator = torch.Generator().manual_seed(seed)
    for name, centre in BLOBS.items():
        blob = torch.tensor(centre) + 0.1 * torch.randn(BLOB, 2, generator=generator)
        both = torch.cat([inside, in_batches(predict, blob)[1]]).double()
        numbers[name] = float(roc_auc_score([0] * TEST + [1] * BLOB, both.numpy()))
    return numbers


# --- results --------------------------------------------------------------------------------------------


def setup(epochs: int) -> dict[str, Any]:
    """What the numbers depend on: a file of another set-up is not resumed."""
    folder = Path(hetsngp.__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted(folder.rglob("*.py")), Path(__file__)):
        digest.update(path.read_bytes())
    return {
        "epochs": epochs,
        "predicted points": PREDICT,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "source": digest.hexdigest()[:16],
    }


def rows_of(entries: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a score, medians over seeds; `train/sngp` is the time relative to our sngp's at the same seed."""
    rows = []
    ours_at = {
        name: {
            seed: {"train": run["train"], "predict": run["scores"]["ood_score"]["predict"]}
            for seed, run in entries.get(name, {}).get("seeds", {}).items()
        }
        for name in REFERENCES
    }
    for name, entry in entries.items():
        runs = entry.get("seeds", {})
        for score in next(iter(runs.values()), {"scores": ()})["scores"]:
            flat = {seed: {"train": run["train"], **run["scores"][score]} for seed, run in runs.items()}
            row: dict[str, Any] = {"method": name, "score": score, "seeds": len(flat)}
            for key in ("train", "predict", "accuracy", *BLOBS):
                row[key] = statistics.median(run[key] for run in flat.values())
            for reference, theirs in ours_at.items():
                common = [seed for seed in flat if seed in theirs]
                for key in ("train", "predict"):
                    ratios = [flat[seed][key] / theirs[seed][key] for seed in common]
                    row[f"{key}/{reference}"] = statistics.median(ratios) if ratios else None
            rows.append(row)
    return rows


def show(entries: dict[str, Any]) -> None:
    def times(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}×"

    print(
        "| method (score) | train, CPU-s | / hetsngp | / sngp | predict 10,000 | / hetsngp | / sngp ", end=""
    )
    print("| AUROC near | far | side | accuracy |\n|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows_of(entries):
        cells = [f"{row['method']} ({row['score']})"]
        for key in ("train", "predict"):
            cells += [f"{row[key]:.2f}", times(row[f"{key}/hetsngp"]), times(row[f"{key}/sngp"])]
        cells += [f"{row[name]:.3f}" for name in (*BLOBS, "accuracy")]
        print(f"| {' | '.join(cells)} |")
    for name, entry in entries.items():
        if not entry.get("seeds"):
            print(f"\n{name}: {entry['status']}. {entry.get('install', '')}")


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(path: Path, document: dict[str, Any]) -> None:
    document["commit"] = commit()
    document["table"] = rows_of(document["entries"])
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def run(name: str, seed: int, epochs: int, warmed: set[str]) -> dict[str, Any]:
    """What to keep about an entry: its numbers, or why there are none."""
    entry = ENTRIES[name]
    try:
        if name not in warmed:
            measure(entry, seed, epochs=1)
            warmed.add(name)
        numbers = measure(entry, seed, epochs)
    except ImportError as error:
        return {"status": f"not installed ({error})", "install": entry.install}
    except Exception as error:
        traceback.print_exc()
        return {"status": f"failed: {type(error).__name__}: {error}", "install": entry.install}
    version = importlib.metadata.version(entry.package) if entry.package else "this checkout"
    return {"status": "measured", "version": version, "seeds": {str(seed): numbers}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for peers.json")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, …")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES), metavar="NAME", help=", ".join(ENTRIES))
    args = parser.parse_args()
    torch.set_num_threads(1)  # the network is too small for threads to pay
    warnings.filterwarnings("ignore")  # the peers' own: deprecations, loader workers, batch sizes
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "peers.json"
    document: dict[str, Any] = {"setup": setup(args.epochs), "entries": {}}
    if path.exists():
        earlier = json.loads(path.read_text())
        if earlier["setup"] == document["setup"]:
            document = earlier
        else:
            print(f"{path} is of another set-up or code: starting over", file=sys.stderr)
    entries, warmed = document["entries"], set()
    # Seeds outside, so that what a ratio compares was measured close together.
    for seed in range(args.seeds):
        for name in args.only or ENTRIES:
            kept = entries.get(name, {}).get("seeds", {})
            if str(seed) in kept:
                continue
            result = run(name, seed, args.epochs, warmed)
            if kept and "seeds" not in result:
                print(f"{name}, seed {seed}: {result['status']}", file=sys.stderr)
                continue
            result["seeds"] = kept | result.get("seeds", {})
            entries[name] = result
            write(path, document)
            done = result["seeds"].get(str(seed))
            text = f"trained in {done['train']:.1f} CPU-s" if done else result["status"]
            print(f"{name}, seed {seed}: {text}", file=sys.stderr, flush=True)
    show(entries)


if __name__ == "__main__":
    main()
