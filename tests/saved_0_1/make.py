"""Write the folders beside this file. It ran once, with hetsngp 0.1.0 (e9b2389), and stays as a record:

    git worktree add /tmp/hetsngp-0.1 e9b2389
    PYTHONPATH=/tmp/hetsngp-0.1/src python tests/saved_0_1/make.py tests/saved_0_1

Each model lies beside ``expected.safetensors``: inputs, and what 0.1 predicted for them.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hetsngp
from hetsngp.nn.backbones import ResidualMLP

FIELDS = (
    "probs",
    "clean_probs",
    "total_uncertainty",
    "data_uncertainty",
    "model_uncertainty",
    "latent_variance",
    "ood_score",
)
OPTIONS = {"random_features": 16, "rank": 2, "dataset_size": 60}


def points() -> tuple[DataLoader, DataLoader, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    y = torch.arange(3).repeat(30)
    angle = 2 * torch.pi * y / 3
    x = 3 * torch.stack([angle.cos(), angle.sin()], 1) + torch.randn(90, 2, generator=g)
    train, held_out = TensorDataset(x[:60], y[:60]), TensorDataset(x[60:], y[60:])
    far = torch.tensor([[30.0, 0.0]])
    return DataLoader(train, batch_size=20), DataLoader(held_out, batch_size=30), torch.cat([x[:5], far])


def train(model, loader, calibration=None):
    g = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            model.loss(x, y, generator=g).backward()
            optimizer.step()
    hetsngp.fit_posterior(model, loader, calibration=calibration)
    return model.eval()


def keep(model, folder: Path, inputs) -> None:
    hetsngp.save(model, folder)
    loaded = hetsngp.load(folder, backbone=own_network() if folder.name == "converted" else None)
    pred = loaded.predict(inputs)
    given = inputs if isinstance(inputs, dict) else {"x": inputs}
    tensors = {f"input.{name}": t for name, t in given.items()}
    save_file(
        tensors | {name: getattr(pred, name).clone() for name in FIELDS}, folder / "expected.safetensors"
    )


def own_network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=20, num_labels=3, **sizes))


def run_folder(out: Path) -> None:
    """A finished run of ``hetsngp train``, and one that was killed after its first epoch."""
    from hetsngp.training.recipe import read_recipe

    from hetsngp.training import Engine, Hardware, Keep
    from hetsngp.training.gradients import FabricGradients
    from hetsngp.training.images import train_images

    os.chdir(out)
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 40), ("test", 8)):
        labels = np.arange(count) % 2
        images = rng.integers(0, 128, (count, 8, 8, 3), dtype=np.uint8) + 100 * labels[:, None, None, None]
        arrays |= {f"x_{split}": images.astype(np.uint8), f"y_{split}": labels}
    np.savez("images.npz", **arrays)
    Path("recipe.toml").write_text(RECIPE)
    engine = Engine(Hardware(devices=1, accelerator="cpu"))
    # Names and values as 0.1 has them, so that what is renamed later is read from here.
    settings = {"seconds": 0, "tensorboard": False}
    summary = train_images(read_recipe("recipe.toml"), engine, Keep(Path("run"), **settings), show=False)
    step = FabricGradients.step

    class Died(BaseException):
        pass

    def dying(self) -> None:
        if self.updates == 4:
            raise Died
        step(self)

    FabricGradients.step = dying
    try:
        train_images(read_recipe("recipe.toml"), engine, Keep(Path("interrupted"), **settings), show=False)
    except Died:
        print("killed at update 4 of", summary["epochs"], "epochs")
    FabricGradients.step = step
    from hetsngp.serving.bundle import open_run

    served = open_run(Path("run"), torch.device("cpu"))
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    pred = served.model.predict(x)
    tensors = {"input.x": x} | {name: getattr(pred, name).clone() for name in FIELDS}
    save_file(tensors, "run/expected.safetensors")


RECIPE = """\
data = "images.npz"
network = "wrn-10-1"
method = "hetsngp"
batch_size = 10
held_out = 0.25
workers = 0

[options]
random_features = 16
rank = 1

[schedule]
epochs = 2
gp_lr = 2.0

[training]
average = 0.9

[hardware]
accelerator = "cpu"
"""


def main(out: Path) -> None:
    assert hetsngp.__version__ == "0.1.0"
    torch.set_num_threads(1)
    loader, held_out, x = points()

    def network(generator):
        return ResidualMLP(2, width=8, depth=1, generator=generator)

    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    model = hetsngp.build("hetsngp", network(g), 3, generator=g, **OPTIONS)
    keep(train(model, loader, held_out), out / "hetsngp", x)

    members = hetsngp.build_ensemble(["sngp", "heteroscedastic"], network, 3, seeds=[0], **OPTIONS)
    for member in members.members:
        train(member, loader, held_out)
    keep(members, out / "ensemble", x)

    torch.manual_seed(0)
    converted = hetsngp.convert(own_network(), "hetsngp", torch.zeros(2, 2), **OPTIONS)
    keep(train(converted, loader, held_out), out / "converted", x)

    torch.manual_seed(0)
    text = hetsngp.convert(bert(), "sngp", **OPTIONS)
    ids = torch.randint(1, 20, (60, 6), generator=torch.Generator().manual_seed(0))
    batches = [({"input_ids": ids[i : i + 20]}, ids[i : i + 20, 0] % 3) for i in (0, 20, 40)]
    keep(train(text, batches), out / "converted_bert", {"input_ids": ids[:5]})

    run_folder(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
