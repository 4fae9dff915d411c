"""The file of a page: its data, numbers and figures, and that nothing of it is taken for code."""

import base64
import hashlib
import io
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetsngp.auditing import sheet
from hetsngp.auditing.examples import Examples, ImageExamples, TableExamples, TextExamples
from hetsngp.auditing.page import other_classes, write_page
from hetsngp.auditing.sheet import _end, draw_suspicious
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.files import ImageFiles
from hetsngp.labels import LabelErrors, class_confusions, find_label_errors
from hetsngp.serving.contact_sheet import SheetCell

HOSTILE = "</script><img src=x onerror=alert(1)>&quot;'\"<!--"


def make_errors(count: int = 150, num_classes: int = 4, share: float = 0.3) -> LabelErrors:
    rng = np.random.default_rng(0)
    true = rng.integers(num_classes, size=count)
    given = np.where(rng.random(count) < share, (true + 1) % num_classes, true)
    logits = rng.normal(size=(count, num_classes)) + 4 * np.eye(num_classes)[true]
    probs = np.exp(logits)
    return find_label_errors(given, probs / probs.sum(1, keepdims=True), sharpening=1.0)


def images(errors: LabelErrors, side: int = 32) -> ImageExamples:
    pixels = torch.randint(256, (len(errors), 3, side, side), generator=torch.Generator().manual_seed(0))
    names = tuple(f"class {k}" for k in range(errors.clean_probs.shape[1]))
    return ImageExamples(ImageArrays(pixels.byte(), torch.as_tensor(errors.labels), names))


def page_of(
    path: Path, errors: LabelErrors, examples: Examples, key: str = "index", **changes: Any
) -> tuple[str, dict[str, Any]]:
    """Text of a page, and the data in it."""
    arguments: dict[str, Any] = {
        "class_names": [f"class {k}" for k in range(errors.clean_probs.shape[1])],
        "names": [f"set[{i}]" for i in range(len(errors))],
        "key": key,
        "title": "Audit of a set",
    }
    write_page(path, errors, examples, **arguments | changes)
    text = path.read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None
    return text, json.loads(data[1])


def test_the_data_are_those_of_the_audit(tmp_path: Path) -> None:
    errors = make_errors()
    _, data = page_of(tmp_path / "page.html", errors, images(errors), key="path")
    chosen = [int(name[4:-1]) for name in data["names"]]
    wrong = errors.wrong_probability
    assert chosen == sorted(range(150), key=lambda i: (-wrong[i], i))[: max(100, (wrong > 0.01).sum())]
    assert 100 <= len(chosen) < 150
    assert data["ids"] == data["names"]
    for place, i in enumerate(chosen):
        assert data["given"][place] == errors.labels[i]
        assert data["suggested"][place] == errors.suggested[i] == data["top"][place][0]
        assert data["wrong"][place] == pytest.approx(wrong[i], abs=1e-4)
        assert data["flagged"][place] == (wrong[i] > 0.5)
        probs = sorted(errors.clean_probs[i].tolist(), reverse=True)[:3]
        assert data["probs"][place] == pytest.approx(probs, abs=1e-4)


def make_doubtful() -> LabelErrors:
    """Of the first example the given label is wrong with 0.6, and still the most probable class."""
    errors = make_errors()
    errors.clean_probs[0] = np.roll([0.4, 0.1, 0.3, 0.2], errors.labels[0])
    errors.wrong_probability[0] = 0.6
    return errors


def test_of_a_flagged_label_another_class_is_suggested(tmp_path: Path) -> None:
    errors = make_doubtful()
    given = int(errors.labels[0])
    assert errors.suggested[0] == given
    others = other_classes(errors)
    assert others[0] == (given + 2) % 4
    assert np.array_equal(others[1:], errors.suggested[1:])
    assert not (others == errors.labels)[errors.is_wrong].any()
    _, data = page_of(tmp_path / "page.html", errors, images(errors))
    place = data["ids"].index("0")
    assert (data["suggested"][place], data["top"][place][:2]) == (others[0], [given, others[0]])


def test_the_key_index_has_numbers_and_most_bounds_the_list(tmp_path: Path) -> None:
    errors = make_errors()
    _, data = page_of(tmp_path / "page.html", errors, images(errors), most=7)
    assert data["ids"] == [str(i) for i in errors.order[:7]]
    assert data["names"] == [f"set[{i}]" for i in errors.order[:7]]


def test_other_data_have_other_choices(tmp_path: Path) -> None:
    """The browser keeps choices under a hash of the data and their labels, whatever was found in them."""
    errors = make_errors()
    found = replace(errors, wrong_probability=errors.wrong_probability[::-1].copy())
    relabelled = replace(errors, labels=(errors.labels + 1) % 4)
    hashes = [
        page_of(tmp_path / "page.html", each, images(errors), **changes)[1]["audit"]
        for each, changes in (
            (errors, {"title": "a"}),
            (found, {"title": "b", "most": 20}),
            (relabelled, {}),
            (errors, {"class_names": ["b", "a", "c", "d"]}),
        )
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_pictures_are_thumbnails_of_the_images(tmp_path: Path) -> None:
    flat = torch.tensor([[200, 30, 60], [10, 20, 250]]).repeat(75, 1)[:, :, None, None].byte()
    errors = make_errors()
    for side, shown in ((32, 32), (300, 112)):
        pixels = flat.expand(-1, -1, side, side).contiguous()
        examples = ImageExamples(ImageArrays(pixels, torch.as_tensor(errors.labels), tuple("abcd")))
        _, data = page_of(tmp_path / "page.html", errors, examples, most=9)
        for name, content in zip(data["ids"], data["contents"], strict=True):
            picture = Image.open(io.BytesIO(base64.b64decode(content)))
            assert (picture.format, picture.size) == ("WEBP", (shown, shown))
            colour = np.asarray(picture.convert("RGB"), dtype=float).mean((0, 1))
            assert colour == pytest.approx(flat[int(name), :, 0, 0].numpy(), abs=8)


def test_images_of_any_channels_and_files_are_pictures(tmp_path: Path) -> None:
    for channels in (1, 2, 3, 4):
        pixels = torch.arange(channels * 4).reshape(1, channels, 2, 2).byte()
        picture = ImageExamples(ImageArrays(pixels, torch.tensor([0]), ("a",))).content(0)
        shown = pixels[0, [0, 1, 2] if channels > 2 else [0, 0, 0]]
        assert np.array_equal(np.asarray(picture), shown.permute(1, 2, 0).numpy())
    Image.new("RGB", (40, 20), "red").save(tmp_path / "a.png")
    files = ImageFiles((tmp_path / "a.png",), torch.tensor([0]), ("a",))
    assert ImageExamples(files).content(0).size == (40, 20)
    assert len(ImageExamples(files)) == 1


def test_a_picture_that_is_gone_does_not_lose_the_page(tmp_path: Path) -> None:
    errors = make_errors(10)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    files = [tmp_path / ("a.png" if i else "gone.png") for i in range(10)]
    examples = ImageExamples(ImageFiles(tuple(files), torch.as_tensor(errors.labels), tuple("abcd")))
    _, data = page_of(tmp_path / "page.html", errors, examples)
    shown = dict(zip(data["ids"], data["contents"], strict=True))
    assert [name for name, content in shown.items() if content is None] == ["0"]
    named = [file.name for file in files]
    draw_suspicious(tmp_path / "sheet.png", errors, examples, class_names=list("abcd"), names=named)
    with Image.open(tmp_path / "sheet.png") as drawn:
        assert (np.asarray(drawn.convert("RGB")) == 224).all(-1).sum() > 1000  # one grey cell


def test_pictures_stand_as_the_camera_was_held(tmp_path: Path) -> None:
    picture = Image.new("RGB", (40, 20), "red")
    picture.paste("blue", (0, 0, 20, 20))
    exif = picture.getexif()
    exif[0x0112] = 6  # the stored left side is the top
    picture.save(tmp_path / "a.png", exif=exif)
    shown = ImageExamples(ImageFiles((tmp_path / "a.png",), torch.tensor([0]), ("a",))).content(0)
    assert shown.size == (20, 40)
    assert [shown.getpixel((10, y)) for y in (5, 35)] == [(0, 0, 255), (255, 0, 0)]


def test_malformed_exif_says_nothing(tmp_path: Path) -> None:
    """Pillow raises errors of many types on it."""
    for number, exif in enumerate((b"Exif\0\0garbage!", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0")):
        file = tmp_path / f"{number}.jpg"
        Image.new("RGB", (40, 20), "red").save(file, exif=exif)
        assert exif in file.read_bytes()
        shown = ImageExamples(ImageFiles((file,), torch.tensor([0]), ("a",))).content(0)
        assert shown.size == (40, 20)


def test_texts_and_rows(tmp_path: Path) -> None:
    errors = make_errors(10)
    texts = [f"text {i}" + "x" * 3000 * (i == 3) for i in range(10)]
    _, data = page_of(tmp_path / "page.html", errors, TextExamples(texts))
    shown = dict(zip(data["ids"], data["contents"], strict=True))
    assert shown["2"] == "text 2"
    assert (len(shown["3"]), shown["3"][-1]) == (2001, "…")
    columns: dict[str, Any] = {"height": np.linspace(1, 2, 10), "name": texts}
    _, data = page_of(tmp_path / "page.html", errors, TableExamples(columns))
    shown = dict(zip(data["ids"], data["contents"], strict=True))
    assert shown["1"] == [["height", "1.11111"], ["name", "text 1"]]
    wide = TableExamples([{f"column {k}": k for k in range(50)}] * 10)
    _, data = page_of(tmp_path / "page.html", errors, wide)
    assert (len(data["contents"][0]), data["contents"][0][-1]) == (41, ["…", "10 more columns"])
    with pytest.raises(ValueError, match="columns must have the same length"):
        TableExamples({"a": [1], "b": [1, 2]})


# --- numbers and figures ----------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_audit(tmp_path: Path) -> None:
    errors = make_errors(4000)
    text, _ = page_of(
        tmp_path / "page.html", errors, images(errors, 2), most=5, notes=["Made by four models."]
    )
    plain = " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())
    low, high = errors.expected_wrong_interval
    assert (
        f"About {errors.expected_wrong:,.0f} of 4,000 labels are probably wrong "
        f"{100 * errors.expected_wrong / 4000:.1f} %" in plain
    )
    assert f"its 95 % interval is {low:,.0f} to {high:,.0f}." in plain
    assert f"{errors.is_wrong.sum():,} labels are flagged" in plain
    assert "Made by four models." in plain
    for k in range(4):
        ours = errors.labels == k
        wrong = errors.wrong_probability[ours].astype(float).sum()
        assert f"class {k} {ours.sum():,} {wrong:,.0f} {100 * wrong / ours.sum():.1f} %" in plain


def test_the_map_has_the_expected_confusions(tmp_path: Path) -> None:
    errors = make_errors(900)
    counts = np.zeros((4, 4))
    for i in range(900):
        for k in range(4):
            counts[errors.labels[i], k] += float(errors.clean_probs[i, k])
    text, _ = page_of(tmp_path / "page.html", errors, images(errors, 2), most=5)
    pattern = r"<title>true class class (\d), given label class (\d): ([\d,.< ]+)</title>"
    titles = {(int(given), int(true)): count for true, given, count in re.findall(pattern, unescape(text))}
    assert len(titles) == 16
    for pair, count in np.ndenumerate(counts):
        shown = titles[pair]
        assert shown == "< 0.1" or float(shown.replace(",", "")) == pytest.approx(count, abs=0.51)
    first = re.search(r'data-given="(\d)" data-suggested="(\d)">class', text)
    assert first is not None
    assert (int(first[1]), int(first[2])) == divmod(int((counts * (1 - np.eye(4))).argmax()), 4)


def test_rows_of_the_map_are_true_classes_as_in_confusions_png(tmp_path: Path) -> None:
    """Zeros are labelled as ones, and ones as nothing else."""
    true = np.arange(300) % 3
    given = np.where((true == 0) & (np.arange(300) < 120), 1, true)
    errors = find_label_errors(given, np.full((300, 3), 0.05) + 0.85 * np.eye(3)[true], sharpening=1.0)
    text, _ = page_of(tmp_path / "page.html", errors, images(errors, 2), most=5)
    cells = re.findall(r'class="cell" data-given="(\d)" data-suggested="(\d)">(.*?)</g>', text, re.S)
    shaded = {
        (int(given), int(true)): re.findall(r'class="shade" x="([\d.]+)" y="([\d.]+)"', cell)
        for given, true, cell in cells
        if 'fill-opacity="1.0"' in cell
    }
    assert shaded == {(1, 0): [("30.5", "0.5")]}  # second column, first row
    largest = np.argwhere(class_confusions(errors).counts * (1 - np.eye(3)) > 20)
    assert largest.tolist() == [[0, 1]]


@pytest.mark.parametrize(("num_classes", "drawn"), [(2, True), (12, True), (30, True), (31, False)])
def test_the_map_is_drawn_up_to_thirty_classes(num_classes: int, drawn: bool, tmp_path: Path) -> None:
    errors = make_errors(400, num_classes)
    text, data = page_of(tmp_path / "page.html", errors, images(errors, 2), most=5)
    assert ("Map of confusions" in text) == drawn
    assert len(data["classes"]) == num_classes
    assert text.count('class="link" data-given=') == min(30, num_classes) + min(10, num_classes)


def test_a_set_without_wrong_labels(tmp_path: Path) -> None:
    errors = make_errors(50, share=0.0)
    text, data = page_of(tmp_path / "page.html", errors, images(errors))
    assert "No class is confused with another." in text
    assert len(data["ids"]) == 50


# --- nothing from the data is code ------------------------------------------------------------------------


class Tags(HTMLParser):
    """Elements and attributes of a page, as a browser splits them."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    errors = make_errors(20)
    names = [f"{HOSTILE}{i}" for i in range(20)]
    classes = [f"{HOSTILE}{k}" for k in range(4)]
    texts = TextExamples([f"{HOSTILE}\u2028"] * 20)
    text, data = page_of(
        tmp_path / "page.html",
        errors,
        texts,
        "path",
        names=names,
        class_names=classes,
        title=HOSTILE,
        notes=[HOSTILE],
    )
    assert data["ids"] == [names[i] for i in errors.order]
    assert data["labels"] == classes
    assert "<img" not in text
    tags = Tags()
    tags.feed(text)
    assert tags.elements.count("script") == 2
    assert not {"img", "iframe", "object", "link", "base"} & set(tags.elements)
    assert not [
        name for _, name, _ in tags.attributes if name.startswith("on") or name in ("style", "src", "href")
    ]


def test_the_policy_allows_this_script_and_style_and_no_network(tmp_path: Path) -> None:
    errors = make_errors(20)
    text, _ = page_of(tmp_path / "page.html", errors, images(errors))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in unescape(policy[1]).split(";"))
    for rule, content in (
        ("script-src", re.findall(r"<script>(.*?)</script>", text, re.S)),
        ("style-src", re.findall(r"<style>(.*?)</style>", text, re.S)),
    ):
        digest = base64.b64encode(hashlib.sha256(content[0].encode()).digest()).decode()
        assert rules.pop(rule) == f"'sha256-{digest}'"
        assert len(content) == 1
    closed = {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}
    assert rules == closed | {"img-src": "data:"}
    assert not re.findall(
        r"""(?:src|href)\s*=\s*["'](?!data:)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", text
    )


# --- what is refused --------------------------------------------------------------------------------------


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    errors = make_errors(20)
    path, shown = tmp_path / "page.html", images(errors)
    for changes, message in (
        ({"names": ["a"] * 19}, "19 names where 20 were expected"),
        ({"class_names": ["a"]}, "1 class_names where 4 were expected"),
        ({"key": "name"}, "unknown key 'name'"),
        ({"names": ["a"] * 20, "key": "path"}, "names are not unique"),
        (
            {"names": [f"{i}\udcff" for i in range(20)], "key": "path"},
            r"\\udcff has letters .* rename the file",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            page_of(path, errors, shown, **changes)
    with pytest.raises(ValueError, match="150 examples where 20 were expected"):
        page_of(path, errors, images(make_errors()))
    several = find_label_errors(np.zeros((5, 2), int), np.full((5, 2), 0.5), sharpening=1.0)
    with pytest.raises(ValueError, match="make an audit for each annotator"):
        page_of(path, several, TextExamples(["a"] * 5))
    assert not list(tmp_path.iterdir())


def test_five_thousand_small_images_are_a_small_file(tmp_path: Path) -> None:
    """Noise, which compresses worst."""
    errors = make_errors(5000, 10)
    errors.wrong_probability[:] = np.linspace(1, 0.02, 5000)
    _, data = page_of(tmp_path / "page.html", errors, images(errors), "path")
    assert len(data["ids"]) == 5000
    assert (tmp_path / "page.html").stat().st_size < 15e6


# --- contact sheet ----------------------------------------------------------------------------------------


def test_the_sheet_shows_the_most_suspicious(tmp_path: Path) -> None:
    """The 64 most suspicious images are red, the others blue, larger than they are drawn."""
    errors = make_errors()
    pixels = torch.zeros(150, 3, 300, 300, dtype=torch.uint8)
    pixels[:, 2] = 255
    first = errors.order[:64]
    pixels[first, 0], pixels[first, 2] = 255, 0
    names = [f"folder/{i}.png" for i in range(150)]
    examples = ImageExamples(ImageArrays(pixels, torch.as_tensor(errors.labels), tuple("abcd")))
    draw_suspicious(tmp_path / "sheet.png", errors, examples, class_names=list("abcd"), names=names)
    found = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB")).astype(int)

    def shown(*colour: int) -> int:
        return int((np.abs(found - np.array(colour)).max(-1) <= 2).sum())

    assert shown(255, 0, 0) > 64 * 4000
    assert shown(0, 0, 255) == 0
    assert shown(0xD5, 0x5E, 0) > 1000  # frames of flagged labels
    with pytest.raises(ValueError, match="shows images, not a text"):
        draw_suspicious(
            tmp_path / "no.png", errors, TextExamples(["a"] * 150), class_names=list("abcd"), names=names
        )


def test_the_sheet_names_the_end_of_a_path_and_a_question_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells: list[SheetCell] = []
    monkeypatch.setattr(sheet, "draw_sheet", lambda drawn, legend, path: cells.extend(drawn))
    errors = make_doubtful()
    place = next(n for n, i in enumerate(errors.order) if i == 0)
    names, classes = [f"ship/{i}.png" for i in range(150)], list("abcd")
    draw_suspicious(tmp_path / "no.png", errors, images(errors), class_names=classes, names=names)
    given = int(errors.labels[0])
    assert place < 64
    assert cells[place].title == "ship/0.png"
    assert list(cells[place].below) == [classes[given], f"→ {classes[(given + 2) % 4]} ?", "P(wrong) 0.60"]
    assert sum("?" in line for cell in cells for line in cell.below) == 1
    assert _end("a/long/folder/ship/12345.png") == "…g/folder/ship/12345.png"
