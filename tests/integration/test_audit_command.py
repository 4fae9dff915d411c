"""``hetsngp audit`` from images on disk to corrected labels that a training reads."""

import csv
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.unit.cli.test_cli import SMALL, invoke, refused
from tests.unit.small_sets import write_image

from hetsngp.auditing.run_audit import AuditSource
from hetsngp.data.label_files import read_labels
from hetsngp.pretrained.image_networks import PACKAGED, PackagedWeights
from hetsngp.training.images import finished
from hetsngp.training.recipes.recipe import read_recipe

timm = pytest.importorskip("timm", reason="pip install 'hetsngp[vision]'")
datasets = pytest.importorskip("sklearn.datasets", reason="pip install 'hetsngp[sklearn]'")
pytest.importorskip("lightning", reason="pip install 'hetsngp[train]'")

SRC = Path(__file__).parents[2] / "src"
CHROMIUM = shutil.which("chromium")
NETWORK, CLASSES = "test_resnet", ("four", "one", "zero")
FILES = {
    *("audit.json", "label_errors.csv", "labels.safetensors", "review.html"),
    *("suspicious.png", "confusions.csv", "confusions.png"),
}
COUNT, SHARE = 240, 0.12


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def content_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "audit.json").read_text())
    return content


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in folders by given label, an eighth of them in a wrong one, with the true class in the name;
    a network without training, whose features do for digits; and a recipe.
    """
    home = tmp_path_factory.mktemp("home")
    digits, rng = datasets.load_digits(), np.random.default_rng(0)
    chosen = np.flatnonzero(np.isin(digits.target, (0, 1, 4)))[:COUNT]
    for number, row in enumerate(chosen):
        true = {4: 0, 1: 1, 0: 2}[int(digits.target[row])]
        given = (true + 1) % 3 if rng.random() < SHARE else true
        pixels = np.repeat((digits.images[row] * 15.9).astype(np.uint8)[..., None], 3, axis=2)
        write_image(home / "photos" / CLASSES[given] / f"{number:03d}-{CLASSES[true]}.png", pixels)
    torch.manual_seed(0)
    save_file(dict(timm.create_model(NETWORK, num_classes=5).state_dict()), home / "net.safetensors")
    (home / "small.toml").write_text(f"data = '{home / 'photos'}'\nsize = 8\nworkers = 0\n{SMALL}")
    return home


def frozen(home: Path) -> list[Any]:
    """Arguments for the small network."""
    return ["--network", NETWORK, "--weights", home / "net.safetensors", "--size", "32"]


def wrong(line: dict[str, str]) -> bool:
    return Path(line["path"]).stem.partition("-")[2] != line["given_label"]


@pytest.fixture(scope="module")
def audited(home: Path) -> tuple[Path, str]:
    """Folder of an audit by a process of its own, and what that printed."""
    out = home / "audit"
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    words = ["audit", "photos", "--out", "audit", "--rounds", "2", *map(str, frozen(home))]
    before = snapshot(home / "photos")
    done = subprocess.run(
        [sys.executable, "-m", "hetsngp", *words], cwd=home, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert snapshot(home / "photos") == before
    return out, done.stdout


@pytest.fixture
def copy(audited: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(audited[0], tmp_path / "audit"))


# --- data -------------------------------------------------------------------------------------------------


def test_most_wrong_labels_are_found(home: Path, audited: tuple[Path, str]) -> None:
    out, printed = audited
    assert {file.name for file in out.iterdir()} == FILES | {"features"}
    lines = rows(out / "label_errors.csv")
    assert len(lines) == COUNT
    planted = sum(map(wrong, lines))
    flagged = [line for line in lines if line["is_label_issue"] == "True"]
    found = [line for line in flagged if wrong(line)]
    assert planted > 20
    assert len(found) >= 0.9 * planted
    assert len(found) >= 0.8 * len(flagged)
    by_path = Path(found[0]["path"]).stem.partition("-")[2]
    assert found[0]["predicted_label"] == by_path
    content = content_of(out)
    low, high = content["expected_wrong_interval"]
    assert 0.7 * planted < content["expected_wrong"] < 1.3 * planted
    assert low < planted < high
    assert content["how"] == "sngp on frozen features of test_resnet, 32 pixels, leave-one-out"
    assert set(content["seconds"]) == {"features", "rounds", "files"}
    # four was given to zeros, one to fours, zero to ones.
    pairs = {(row["true"], row["given"]) for row in rows(out / "confusions.csv")[:3]}
    assert pairs == {("zero", "four"), ("four", "one"), ("one", "zero")}
    assert "next: open audit/review.html" in printed
    assert "hetsngp audit photos --apply choices.csv --out audit" in printed
    assert "hetsngp train frozen --set data=photos --set labels=audit --out runs/audit-corrected" in printed


def test_the_same_command_again_changes_nothing(home: Path, audited: tuple[Path, str]) -> None:
    before = snapshot(audited[0])
    done = invoke("audit", home / "photos", "--out", audited[0], "--rounds", "2", *frozen(home))
    assert done.exit_code == 0, done.output
    assert "the audit is finished" in done.output
    assert snapshot(audited[0]) == before


def test_other_settings_use_the_features_again(home: Path, copy: Path) -> None:
    parts = {file: file.stat().st_mtime_ns for file in copy.rglob("features/*/*")}
    done = invoke("audit", home / "photos", "--out", copy, "--rounds", 1, "--no-page", *frozen(home))
    assert done.exit_code == 0, done.output
    assert parts == {file: file.stat().st_mtime_ns for file in copy.rglob("features/*/*")}
    assert not (copy / "review.html").exists()
    assert done.output.count("review.html") == 1
    assert "review.html, of an earlier audit, will be removed" in done.output
    assert len(content_of(copy)["rounds"]) == 1


def test_choices_are_applied_and_trained_on(home: Path, copy: Path, tmp_path: Path) -> None:
    """From the page's CSV file to a training that reads soft targets, a changed label and a dropped one."""
    lines = rows(copy / "label_errors.csv")
    chosen = [line["path"] for line in lines[:3]]
    other = next(
        name for name in CLASSES if name not in (lines[1]["given_label"], lines[1]["predicted_label"])
    )
    decisions = (("keep", ""), ("change", other), ("drop", ""))
    text = "path,given_label,decision,new_label\n"
    for line, (decision, new) in zip(lines, decisions, strict=False):
        text += f"{line['path']},{line['given_label']},{decision},{new}\n"
    (tmp_path / "choices.csv").write_text(text)
    photos, before = home / "photos", snapshot(home / "photos")
    done = invoke("audit", photos, "--apply", tmp_path / "choices.csv", "--out", copy)
    assert done.exit_code == 0, done.output
    assert f"3 choices in {tmp_path / 'choices.csv'}: 1 kept, 1 changed, 1 dropped" in done.output
    assert f"{copy / 'corrected_labels.csv'} has 3 choices now" in done.output
    (tmp_path / "none.csv").write_text("path,given_label,decision,new_label\n")
    done = invoke("audit", photos, "--apply", tmp_path / "none.csv", "--out", copy)
    assert "it has a heading alone, and takes nothing back" in done.output
    assert "has 3 choices now" in done.output
    labels = read_labels(copy)
    row = {name: number for number, name in enumerate(labels.names)}
    assert labels.targets[row[chosen[0]]].max() == 1
    assert labels.class_names[int(labels.labels[row[chosen[0]]])] == lines[0]["given_label"]
    assert labels.class_names[int(labels.labels[row[chosen[1]]])] == other
    assert [name for name, kept in zip(labels.names, labels.is_kept, strict=True) if not kept] == [chosen[2]]
    run = tmp_path / "run"
    done = invoke("train", home / "small.toml", "--set", f"labels={copy}", "--out", run)
    assert done.exit_code == 0, done.output
    assert "held-out by the corrected labels: accuracy" in done.output
    summary = finished(run)
    assert summary is not None
    changed = int((labels.changed & labels.is_kept).sum())
    assert summary["labels"] == {"path": str(copy), "dropped": 1, "changed": changed}
    assert changed > 20
    assert snapshot(photos) == before


def test_the_printed_training_of_a_small_folder_runs(
    home: Path, audited: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    network = timm.create_model(NETWORK, num_classes=5)
    network.load_state_dict(load_file(home / "net.safetensors"))
    torch.save(dict(network.state_dict()), tmp_path / "net.pth")  # in the order of the layers
    code = f"class File:\n    get_model_file_path = staticmethod(lambda: {str(tmp_path / 'net.pth')!r})\n"
    (tmp_path / "weights_of_tests.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGED, "tiny", PackagedWeights("weights_of_tests", "File", NETWORK))
    line = next(line for line in audited[1].splitlines() if line.startswith("  hetsngp train frozen"))
    words = [*shlex.split(line)[1:-1], tmp_path / "runs" / "a"]
    changes = ("network=tiny", "size=32", "method=sngp", "options.random_features=64")
    words += [word for change in changes for word in ("--set", change)]
    done = invoke(*words, "--set", "hardware.accelerator=cpu")
    assert done.exit_code == 0, done.output
    summary = finished(tmp_path / "runs" / "a")
    assert summary is not None
    assert summary["labels"]["path"] == "audit"


def test_many_images_of_each_class_are_trained_from_scratch() -> None:
    source = AuditSource("photos", "photos")
    content: dict[str, Any] = {"classes": [{}, {}], "key": "path"}
    few, many, arrays = (
        source.train_command(Path("audit"), {**content, **changes})
        for changes in ({"examples": 3999}, {"examples": 4000}, {"examples": 5000, "key": "index"})
    )
    end = "--set labels=audit --out runs/audit-corrected"
    assert few == f"hetsngp train frozen --set data=photos {end}"
    assert many == f"hetsngp train images --set data=photos {end}"
    assert arrays == f"hetsngp train images --set data=photos --set size=none {end}"
    network = {"network": "resnet18", "settings": {"weights": None, "size": None}, "examples": 700}
    assert source.train_command(Path("audit"), {**content, **network}) == (
        "hetsngp train frozen --set data=photos --set network=resnet18 --set features=audit/features " + end
    )


def test_the_printed_training_reads_odd_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value none leaves a key out, and a date is no text in TOML; the folders are found all the same."""
    monkeypatch.chdir(tmp_path)
    content: dict[str, Any] = {"classes": [{}, {}], "key": "path", "examples": 4000}
    for name in ("none", "2024-05-01", "1e3", "my photos"):
        Path(name).mkdir()
        monkeypatch.chdir(name)
        words = shlex.split(AuditSource(name, name).train_command(Path("."), content))
        assert words[-2:] == ["--out", f"runs/{name}-corrected"]
        monkeypatch.chdir(tmp_path)
        words = shlex.split(AuditSource(name, name).train_command(Path(name), content))
        changes = [change for flag, change in pairwise(words) if flag == "--set"]
        task = read_recipe(words[2], changes).task
        assert (Path(task.data), Path(str(task.labels))) == (Path(name), Path(name))


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install chromium")
def test_the_page_of_the_command_in_a_browser(home: Path, copy: Path, tmp_path: Path) -> None:
    """Decide there, download, and apply the file as it is."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        messages: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.goto((copy / "review.html").as_uri())
        cards = page.locator(".card")
        assert cards.count() == content_of(copy)["flagged"]
        picture = page.locator(".card img").first
        assert picture.evaluate("image => image.complete && image.naturalWidth") == 8
        first, second = page.locator(".card .name").all_inner_texts()[:2]
        cards.first.scroll_into_view_if_needed()
        page.keyboard.press("y")
        page.keyboard.press("d")
        with page.expect_download() as waiting:
            page.get_by_role("button", name="Download choices.csv").click()
        waiting.value.save_as(tmp_path / "choices.csv")
        page.screenshot(path=tmp_path / "page.png")
        browser.close()
    assert messages == []
    decided = {row["path"]: row["decision"] for row in rows(tmp_path / "choices.csv")}
    assert decided == {first: "change", second: "drop"}
    done = invoke("audit", home / "photos", "--apply", tmp_path / "choices.csv", "--out", copy)
    assert "0 kept, 1 changed, 1 dropped" in done.output, done.output


def test_arrays_are_audited_by_index(home: Path, tmp_path: Path) -> None:
    from hetsngp.data.sources import open_set

    images = open_set(home / "photos", "train").load(8)
    pixels, labels = images.images[:, :1].permute(0, 2, 3, 1).numpy(), images.labels.numpy()
    np.savez(tmp_path / "grey.npz", x_train=pixels, y_train=labels, class_names=np.array(images.class_names))
    done = invoke("audit", tmp_path / "grey.npz", "--out", tmp_path / "a", "--rounds", 1, *frozen(home))
    assert done.exit_code == 0, done.output
    lines = rows(tmp_path / "a" / "label_errors.csv")
    assert sorted(int(line["index"]) for line in lines) == list(range(COUNT))
    planted = {
        str(i)
        for i, file in enumerate(open_set(home / "photos", "train").files)
        if file.stem.partition("-")[2] != file.parent.name
    }
    found = {line["index"] for line in lines if line["is_label_issue"] == "True"}
    assert len(found & planted) >= 0.9 * len(planted)
    assert "hetsngp train frozen --set data=" in done.output


def test_labels_that_are_all_correct_warn_of_nothing(tmp_path: Path, home: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(120):
        level = (40, 200)[number % 2]
        pixels = np.clip(rng.normal(level, 5, (8, 8, 3)), 0, 255).astype(np.uint8)
        write_image(tmp_path / "photos" / ("dark", "light")[number % 2] / f"{number}.png", pixels)
    words = ["audit", tmp_path / "photos", "--out", tmp_path / "a", "--rounds", 1, *frozen(home)]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert "warning" not in done.output
    assert content_of(tmp_path / "a")["flagged"] == 0


@pytest.mark.slow
def test_a_killed_audit_goes_on(home: Path, audited: tuple[Path, str], tmp_path: Path) -> None:
    """Ctrl-C among the features says how to go on; the same command ends with the files of another run."""
    out = tmp_path / "audit"
    code = (
        "import sys, time\n"
        "from hetsngp.pretrained import feature_cache\n"
        "from hetsngp.pretrained.image_networks import PretrainedNetwork\n"
        "feature_cache.PART = 16\n"
        "features = PretrainedNetwork.features\n"
        "PretrainedNetwork.features = lambda *given: (time.sleep(0.3), features(*given))[1]\n"
        "sys.argv[0] = 'hetsngp'\n"
        "from hetsngp.cli import main\n"
        "main()\n"
    )
    words = ["audit", str(home / "photos"), "--out", str(out), "--rounds", "2", *map(str, frozen(home))]
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A suite that was started in the background of a shell has interrupts ignored.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until = time.monotonic() + 60
        while len(list(out.rglob("features/*/*.safetensors"))) < 3:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "run the same command again to resume" in output
    assert "Traceback" not in output
    kept = {file: file.stat().st_mtime_ns for file in out.rglob("features/*/*.safetensors")}
    assert 3 <= len(kept) < COUNT / 16
    assert not (out / "audit.json").exists()
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert kept == {file: file.stat().st_mtime_ns for file in kept}
    assert (out / "label_errors.csv").read_text() == (audited[0] / "label_errors.csv").read_text()


# --- recipes ----------------------------------------------------------------------------------------------


def test_a_recipe_is_audited_in_folds(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetsngp.labels.rounds.FEWEST_EXAMPLES", COUNT)
    monkeypatch.setattr("hetsngp.labels.rounds.FEWEST_VALIDATION", COUNT // 5)
    out = tmp_path / "audit"
    words = ["audit", home / "small.toml", "--set", "schedule.epochs=16", "--set", "method=sngp"]
    words += ["--folds", 2, "--rounds", 2, "--out", out]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert {file.name for file in out.iterdir()} == FILES | {"folds"}
    assert {folder.name for folder in (out / "folds").iterdir()} == {"round-1", "round-2"}
    for number in (1, 2):
        summary = finished(out / "folds" / "round-2" / f"fold-{number}")
        assert summary is not None
        assert summary["recipe"]["task"]["labels"] == str(out / "folds" / "round-2")
    lines = rows(out / "label_errors.csv")
    planted = sum(map(wrong, lines))
    # Half of the digits train a small network for 16 epochs: it ranks wrong labels far above chance.
    assert sum(map(wrong, lines[:planted])) > 3 * planted * planted / COUNT
    content = content_of(out)
    assert content["how"] == "recipe small (sngp, wrn-10-1) in 2 folds"
    assert done.output.index("2 trainings for each round, at most 4 ") < done.output.index("epoch 1/")
    assert "hetsngp train" in done.output
    assert f"--set labels={out}" in done.output
    runs = {file: file.stat().st_mtime_ns for file in (out / "folds").rglob("*") if file.is_file()}
    again = invoke(*words, "--most", 5)  # written anew, from the runs that are there
    assert again.exit_code == 0, again.output
    assert "epoch 1/" not in again.output
    models = [file for file in runs if "model" in file.parts or file.suffix == ".csv"]
    assert len(models) > 4
    assert all(file.stat().st_mtime_ns == runs[file] for file in models)
    assert rows(out / "label_errors.csv") == lines


@pytest.mark.slow
def test_a_killed_audit_of_a_recipe_goes_on(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "audit"
    words = ["audit", str(home / "small.toml"), "--set", "schedule.epochs=8", "--folds", "2"]
    words += ["--rounds", "1", "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hetsngp", *words],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 120
        while not (out / "folds/round-1/fold-2/metrics.csv").exists():  # within the second run
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    first = out / "folds/round-1/fold-1"
    before = {file: file.stat().st_mtime_ns for file in first.rglob("*.safetensors")}
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert before == {file: file.stat().st_mtime_ns for file in before}
    whole = tmp_path / "whole"
    done = invoke(*words[:-1], whole)
    assert done.exit_code == 0, done.output
    assert (out / "label_errors.csv").read_text() == (whole / "label_errors.csv").read_text()


# --- what is refused --------------------------------------------------------------------------------------


def test_mistakes_are_named_with_what_to_do(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos, recipe = home / "photos", home / "small.toml"
    (tmp_path / "choices.csv").write_text("path,given_label,decision,new_label\n")
    cases: list[tuple[list[Any], str]] = [
        (["phots"], "there is no data set, folder, .npz file or recipe 'phots'"),
        (["cifr10"], "did you mean 'cifar10'?"),
        ([home / "phots"], f"did you mean '{photos}'?"),
        ([next((photos / "one").iterdir())], "is a file: give the folder that has one folder for each class"),
        ([photos, "--set", "seed=1"], "--set changes a recipe"),
        ([photos, "--folds", COUNT + 1], f"{COUNT} images cannot be divided into {COUNT + 1} folds"),
        ([photos, "--folds", 1], "--folds"),
        ([photos, "--out", photos / "audit"], f"such as --out {home / 'photos-audit'}"),
        ([photos, "--out", photos], "its pictures would become examples: give another folder"),
        ([photos, "--weights", "nothing"], "--weights"),
        ([photos, "--apply", "nothing.csv"], "--apply"),
        ([photos, "--apply", "choices.csv"], "audits/photos has no finished audit: make one first"),
        ([photos, "--apply", "choices.csv"], "or give the folder that has one, --out FOLDER"),
        ([photos / "one"], "have one class"),
        ([recipe, "--network", "resnet18"], "--network is for a frozen network"),
        ([recipe, "--device", "cuda:1"], "--set hardware.accelerator=cpu"),
        ([recipe, "--set", "fold=1/2"], "fold is set by the audit"),
        ([recipe, "--set", "labels=audit"], "labels is set by the audit"),
        ([recipe, "--set", "hardware.devices=2"], "one device"),
        ([recipe, "--set", "schedule.epoch=2"], "did you mean 'schedule.epochs'?"),
    ]
    for words, message in cases:
        refused(invoke("audit", *words), message)
    assert {path.name for path in tmp_path.iterdir()} == {"choices.csv"}


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_an_audit_does_not_write_into_held_out_images(held_out: str, tmp_path: Path) -> None:
    for name in ("train/a", "train/b", f"{held_out}/a", f"{held_out}/b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name / f"{number}.png")
    before = sorted(tmp_path.rglob("*"))
    refused(
        invoke("audit", tmp_path / "photos", "--out", tmp_path / "photos" / held_out / "audit"),
        "the audit would write into the data",
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_multi_label_images_have_no_single_wrong_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetsngp.auditing import run_audit
    from hetsngp.data.images.multi_label import MultiLabelFiles

    files = MultiLabelFiles.of(tmp_path, ["a.jpg", "b.jpg"], [[0], [0, 1]], CLASSES)
    monkeypatch.setattr(run_audit, "open_set", lambda spec, split: files)
    with pytest.raises(ValueError, match="an audit is for images with one label each"):
        AuditSource("imagenet21k", "imagenet21k").open()


def test_an_audit_of_other_data_is_not_overwritten(home: Path, copy: Path, tmp_path: Path) -> None:
    photos = Path(shutil.copytree(home / "photos", tmp_path / "photos"))
    (tmp_path / "choices.csv").write_text("path,given_label,decision,new_label\n")
    moved = next((photos / "one").iterdir())
    moved.rename(photos / "zero" / moved.name)
    before = snapshot(copy)
    change = f"of other data (1 with another label, such as one/{moved.name}, now zero/{moved.name}): "
    for words, what_to_do in (
        (["--rounds", 2, *frozen(home)], "give another folder, --out; or, to audit"),
        (["--apply", tmp_path / "choices.csv"], "choices are applied to the data as they were then"),
    ):
        refused(invoke("audit", photos, "--out", copy, *words), change + what_to_do)
    assert snapshot(copy) == before
    (copy / "audit.json").unlink()  # as the error says; the features are those of before
    done = invoke("audit", photos, "--out", copy, "--rounds", 1, *frozen(home))
    assert done.exit_code == 0, done.output
    assert Counter(line["given_label"] for line in rows(copy / "label_errors.csv"))["zero"] == len(
        list((photos / "zero").iterdir())
    )


def test_choices_about_other_data_are_not_taken_for_those_of_a_new_audit(
    home: Path, copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "choices.csv").write_text("path,given_label,decision,new_label\n")
    done = invoke("audit", home / "photos", "--apply", tmp_path / "choices.csv", "--out", copy)
    assert done.exit_code == 0, done.output
    photos = Path(shutil.copytree(home / "photos", tmp_path / "photos"))
    next((photos / "one").iterdir()).unlink()
    (copy / "audit.json").unlink()
    words = ["--out", copy, "--rounds", 1, *frozen(home)]
    before = snapshot(copy)
    refused(invoke("audit", photos, *words), "has the choices of a person about other data")
    (copy / "labels.safetensors").unlink()
    refused(invoke("audit", home / "photos", *words), "nothing there says of which")
    del before[copy / "labels.safetensors"]
    assert snapshot(copy) == before
    (copy / "corrected_labels.csv").unlink()
    done = invoke("audit", photos, *words)
    assert done.exit_code == 0, done.output


def test_an_audit_without_its_sheet_is_made_again(home: Path, copy: Path) -> None:
    words = ["audit", home / "photos", "--out", copy, "--rounds", 2, *frozen(home)]
    sheet = (copy / "suspicious.png").read_bytes()
    (copy / "suspicious.png").unlink()
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert (copy / "suspicious.png").read_bytes() == sheet


def test_copies_with_other_labels_are_named(home: Path, copy: Path, tmp_path: Path) -> None:
    photos = Path(shutil.copytree(home / "photos", tmp_path / "photos"))
    first = min((photos / "zero").iterdir())
    shutil.copy(first, photos / "one" / "again.png")
    shutil.copy(first, photos / "zero" / "same.png")  # with the same label
    shutil.copytree(copy / "features", tmp_path / "out" / "features")
    done = invoke("audit", photos, "--out", tmp_path / "out", "--rounds", 1, *frozen(home))
    assert done.exit_code == 0, done.output
    names = ["one/again.png", f"zero/{first.name}", "zero/same.png"]
    assert content_of(tmp_path / "out")["copies_with_other_labels"] == [names]
    sentence = (
        f"1 example is there more than once with different labels, at most one of them correct: {names[0]}"
    )
    assert sentence in done.output
    assert sentence in (tmp_path / "out" / "review.html").read_text()


def test_files_that_are_no_images_are_all_named(home: Path, tmp_path: Path) -> None:
    photos = Path(shutil.copytree(home / "photos", tmp_path / "photos"))
    for name in ("zero/bad1.png", "one/bad2.png"):
        (photos / name).write_bytes(b"")
    done = invoke("audit", photos, "--out", tmp_path / "a", *frozen(home))
    refused(done, "bad1.png")
    refused(done, "bad2.png")
    refused(done, f"2 of {COUNT + 2} images cannot be used")


def test_a_name_of_data_and_of_a_recipe_is_data_unless_it_is_said() -> None:
    assert AuditSource.find("cifar10").recipe is None
    assert AuditSource.find("cifar10").note is not None
    recipe = AuditSource.find("cifar10", ["seed=1"], recipe=True)
    assert recipe.recipe is not None
    assert recipe.note is None
    assert "--recipe --apply" in recipe.command(Path("a"))
    assert "--set seed=1" in recipe.command(Path("a"))
    assert AuditSource.find("cifar10-cpu").recipe is not None
    assert AuditSource.find("cifar10n:worse").folder == Path("audits/cifar10n-worse")
    assert AuditSource.find("cifar100/hetsngp").folder == Path("audits/cifar100-hetsngp")


def test_the_default_network_is_the_one_whose_weights_are_there(tmp_path: Path, home: Path) -> None:
    pytest.importorskip(PACKAGED["efficientnet-lite0"].package, reason="pip install 'hetsngp[weights]'")
    done = invoke("audit", home / "photos", "--out", tmp_path, "--rounds", 1, "--size", 32, "--no-page")
    assert done.exit_code == 0, done.output
    assert content_of(tmp_path)["network"] == "efficientnet-lite0"
