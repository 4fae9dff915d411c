"""Small trainings to be killed: ``python -m tests.integration.killed_run CASE FOLDER``."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tests.contract import toy
from tests.unit.small_texts import sentences, tiny_bert, tokenizer_json
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

import hetsngp
from hetsngp.conversion.text_encoder import TextEncoder
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader
from hetsngp.data.text import LabelledTexts, TextLoader, TextTokenizer
from hetsngp.nn.backbones import ResidualMLP, WideResNet
from hetsngp.training import CheckpointConfig, Engine, Hardware, Schedule, TrainConfig, Trained

BATCH_SECONDS = 0.01  # so that there is a moment between two checkpoints, too
TIMES = ("seconds", "examples_per_second")
Case = tuple[hetsngp.Classifier, Any, TrainConfig, Any]


def slow_collate(rows: list[Any]) -> Any:
    time.sleep(BATCH_SECONDS)
    return default_collate(rows)


class SlowLoader(DeviceLoader):
    def _batch(self, *args: Any) -> tuple[Tensor, Tensor]:
        time.sleep(BATCH_SECONDS)
        return super()._batch(*args)


class SlowTextLoader(TextLoader):
    def _batch(self, *args: Any) -> tuple[dict[str, Tensor], Tensor]:
        time.sleep(BATCH_SECONDS)
        return super()._batch(*args)


class Jittered(Dataset[Any]):
    """A transform that draws from Python's, NumPy's and torch's generators."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = random.gauss(0.0, 0.1) + np.random.normal(0.0, 0.1)  # noqa: NPY002
        return self.x[index] + shift + 0.1 * torch.randn(2), self.y[index]


def rows_of(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x, y, strict=True))


def build(method: str, backbone: Any, **options: Any) -> hetsngp.Classifier:
    """The same at every call."""
    return hetsngp.build(
        method, backbone, 3, generator=torch.Generator().manual_seed(2), **{**toy.TINY, **options}
    )


def mlp() -> Case:
    """Everything that has a state, at once; 5 updates an epoch, the last of a single batch."""
    network = ResidualMLP(2, 16, 2, dropout=0.2, generator=torch.Generator().manual_seed(1))
    x, y = toy.blobs(3, 20, flip=0.3)
    loader = DataLoader(rows_of(x, y), 7, shuffle=True, collate_fn=slow_collate)
    schedule = Schedule(14, 0.003, warmup=1.5, smooth=True, optimizer="sgd")
    config = TrainConfig(schedule, accumulate=2, ema_decay=0.8, patience=3, bound_every=3)
    return build("hetsngp", network), loader, config, [toy.blobs(3, 12, flip=0.3, seed=1)]


def images() -> Case:
    """6 updates an epoch."""
    network = WideResNet(depth=10, width=1, generator=torch.Generator().manual_seed(1))
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (50, 3, 8, 8), dtype=np.uint8))
    data = ImageArrays(pixels, torch.arange(50) % 3, ("a", "b", "c"))
    loader = SlowLoader(data, 8, shuffle=True, augment=Augmentation(crop=1))
    config = TrainConfig(Schedule(6, 0.01), clip=1.0, bound_every=2)
    return build("hetsngp", network, spectral_bound=6.0), loader, config, None


def workers() -> Case:
    """10 updates an epoch."""
    network = ResidualMLP(2, 16, 1, dropout=0.1, generator=torch.Generator().manual_seed(1))
    data, generator = Jittered(*toy.blobs(3, 20)), torch.Generator().manual_seed(3)
    loader = DataLoader(data, 6, shuffle=True, generator=generator, num_workers=1, collate_fn=slow_collate)
    return build("sngp", network), loader, TrainConfig(Schedule(4, 0.02)), None


def texts() -> Case:
    """7 updates an epoch, of texts of similar length; the network has dropout."""
    tokens = TextTokenizer(tokenizer_json(), 24).encode(LabelledTexts.from_lists(*sentences(60)))
    model = hetsngp.convert(
        TextEncoder(tiny_bert()),
        "hetsngp",
        num_classes=3,
        generator=torch.Generator().manual_seed(2),
        **toy.TINY,
    )
    loader = SlowTextLoader(tokens, 8, shuffle=True)
    return model, loader, TrainConfig(Schedule(5, 0.003, warmup=1, smooth=True), clip=1.0), None


CASES = {"mlp": mlp, "images": images, "workers": workers, "texts": texts}


def train(case: str, folder: Path) -> Trained:
    """Begin the run in ``folder``, or resume it."""
    model, loader, config, held_out = CASES[case]()
    checkpoints = CheckpointConfig(folder, seconds=0, tensorboard=False)
    engine = Engine(Hardware(accelerator="cpu"))
    return engine.train(model, loader, config, held_out=held_out, checkpoints=checkpoints, show=False)


def found(trained: Trained) -> dict[str, Any]:
    """All that does not depend on the clock, as JSON has it."""
    rows = [{name: value for name, value in row.items() if name not in TIMES} for row in trained.rows]
    history = [[r.epoch, r.loss, r.held_out] for r in trained.history]
    return {"history": history, "rows": rows, "best": trained.best}


def without_times(file: Path) -> list[dict[str, str]]:
    """Of ``metrics.csv``."""
    with open(file, newline="") as handle:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(handle)]


def only_fabric() -> None:
    """Leave out lightning's other half, torchmetrics and what these import: half the time of a start."""
    spec = importlib.util.find_spec("lightning")
    assert spec is not None
    sys.modules["lightning"] = importlib.util.module_from_spec(spec)
    sys.modules["torchmetrics"] = None  # type: ignore[assignment]


def main(case: str, folder: str) -> None:
    only_fabric()
    trained = train(case, Path(folder) / "run")
    final = {name: t.contiguous() for name, t in trained.model.state_dict().items()}
    save_file(final, Path(folder) / "final.safetensors")
    text = json.dumps({**found(trained), "resumed": trained.resumed})
    (Path(folder) / "final.json").write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
