"""Models that hetsngp.save has written alone: what is assumed about their images, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from tests.unit.small_sets import random_bytes, write_image

pytest.importorskip("typer", reason="pip install 'hetsngp[cli]'")
pytest.importorskip("PIL.Image")

from tests.unit.cli.test_cli import invoke

import hetsngp
from hetsngp.data.images.decoding import open_picture, resize_and_center_crop
from hetsngp.nn.backbones import WideResNet
from hetsngp.serving.bundle import open_run
from hetsngp.serving.plain_models import read_class_names

NETWORK = "test_vit.r160_in1k"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    timm = pytest.importorskip("timm", reason="pip install 'hetsngp[vision]'")
    torch.manual_seed(0)
    network = timm.create_model(NETWORK, num_classes=3)
    model = hetsngp.convert(network, "deterministic", freeze=True)
    hetsngp.save(model, tmp_path / "saved")
    write_image(tmp_path / "photo.png", random_bytes(200, 180, 3))
    return tmp_path / "saved"


def test_images_are_prepared_as_timm_says(saved: Path) -> None:
    timm = pytest.importorskip("timm")
    config = timm.get_pretrained_cfg(NETWORK)
    served = open_run(saved)
    size = config.input_size[1]
    assert served.inputs.size == (size, size)
    photo = saved.parent / "photo.png"
    pixels = resize_and_center_crop(open_picture(photo, "photo"), size, int(size / config.crop_pct))
    mean, std = (torch.tensor(value)[:, None, None] for value in (config.mean, config.std))
    assert torch.allclose(served.inputs.read([photo])[0], (pixels / 255 - mean) / std, atol=1e-6)
    assert served.thresholds is None
    assert served.inputs.class_names == ("0", "1", "2")


def test_predict_says_what_it_assumed_and_gives_no_verdicts(saved: Path) -> None:
    done = invoke("predict", saved, saved.parent / "photo.png", "--json")
    assert done.exit_code == 0, done.output
    assert "timm's test_vit takes them" in done.stderr
    assert "no thresholds for verdicts; classes are numbered, --classes names them" in done.stderr
    record = json.loads(done.stdout.splitlines()[0])
    x = open_run(saved).inputs.read([saved.parent / "photo.png"])
    prediction = hetsngp.load(saved).predict(x)
    assert (record["label"], record["verdict"], record["text"]) == (str(int(prediction.labels)), "", "–")
    assert record["confidence"] == pytest.approx(float(prediction.confidence), rel=1e-5)
    (saved.parent / "names.txt").write_text("cat\ndog\n\nowl\n")
    sheet = saved.parent / "sheet.png"
    for names in ("cat,dog, owl", str(saved.parent / "names.txt")):
        named = invoke("predict", saved, saved.parent / "photo.png", "--classes", names, "--sheet", sheet)
        assert named.exit_code == 0, named.output
        assert ("cat", "dog", "owl")[int(prediction.labels)] in named.stdout
        assert "classes are numbered" not in named.stderr
    assert sheet.exists()
    with pytest.raises(ValueError, match="the model has 3 classes, and 2 names were given"):
        open_run(saved, class_names=("cat", "dog"))
    with pytest.raises(ValueError, match="--classes takes two or more names"):
        read_class_names("cat")
    many = [f"class number {number}" for number in range(1000)]
    assert read_class_names(",".join(many)) == tuple(many)


def test_of_any_other_network_the_error_has_a_line_that_works(tmp_path: Path) -> None:
    hetsngp.save(hetsngp.build("deterministic", WideResNet(10, 1), 4), tmp_path / "saved")
    with pytest.raises(FileNotFoundError, match="does not say how it takes them") as caught:
        open_run(tmp_path / "saved")
    line = re.search(r"from hetsngp\.data.*", str(caught.value))
    assert line is not None
    exec(line[0])
    served = open_run(tmp_path / "saved")
    assert served.inputs.class_names == ("0", "1", "2", "3")
    assert served.thresholds is None
    with pytest.raises(ValueError, match="has the names of the classes"):
        open_run(tmp_path / "saved", class_names=("a", "b", "c", "d"))


def test_a_run_without_its_preprocessing_is_not_guessed_at(saved: Path) -> None:
    run = saved.parent / "run"
    run.mkdir()
    saved.rename(run / "model")
    (run / "summary.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"serving\.json is missing"):
        open_run(run)
