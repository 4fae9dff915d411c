"""The page of an audit in a browser: what a person decides there, and that nothing leaves the file."""

import csv
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetsngp.auditing.choices import LabelChoice, read_choices, write_corrected
from hetsngp.auditing.examples import ImageExamples, TableExamples, TextExamples
from hetsngp.auditing.page import write_page
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.labels import LabelErrors, find_label_errors

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: install chromium")

ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]
COUNT, PER_PAGE = 200, 60
CLASSES = ["cat", "dog", "bird, small", 'fish "quoted"']
HOSTILE = "</script><img src=x onerror=\"document.title='broken in'\">"


def make_errors(count: int = COUNT, num_classes: int = len(CLASSES), share: float = 0.5) -> LabelErrors:
    rng = np.random.default_rng(0)
    true = rng.integers(num_classes, size=count)
    given = np.where(rng.random(count) < share, (true + 1) % num_classes, true)
    logits = rng.normal(size=(count, num_classes)) + 3 * np.eye(num_classes)[true]
    probs = np.exp(logits)
    return find_label_errors(given, probs / probs.sum(1, keepdims=True), sharpening=1.0)


def make_page(path: Path, errors: LabelErrors, examples: Any = None, **changes: Any) -> Path:
    if examples is None:
        pixels = torch.randint(256, (len(errors), 3, 32, 32), generator=torch.Generator().manual_seed(0))
        names = tuple(map(str, range(errors.clean_probs.shape[1])))
        examples = ImageExamples(ImageArrays(pixels.byte(), torch.as_tensor(errors.labels), names))
    arguments: dict[str, Any] = {
        "class_names": CLASSES,
        "names": [f"photos/{i}.png" for i in range(len(errors))],
        "key": "path",
        "title": "Audit of photos",
    }
    write_page(path, errors, examples, **arguments | changes)
    return path


@pytest.fixture(scope="module")
def errors() -> LabelErrors:
    return make_errors()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory, errors: LabelErrors) -> Path:
    return make_page(tmp_path_factory.mktemp("audit") / "page.html", errors)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open pages in a profile of their own; at the end nothing was requested and no error was printed."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(15_000)
    messages: list[str] = []
    requests: list[str] = []
    files: set[str] = set()
    context.on("request", lambda request: requests.append(request.url))
    context.on("console", lambda message: messages.append(message.text))
    context.on("weberror", lambda error: messages.append(str(error.error)))

    def opened(file: Path) -> Any:
        files.add(file.as_uri())
        page = context.new_page()
        page.goto(file.as_uri())
        return page

    yield opened
    context.close()
    assert messages == []
    assert {url for url in requests if not url.startswith(("data:", "blob:"))} == files


def names(page: Any) -> list[str]:
    return page.locator(".card .name").all_inner_texts()


def decided(page: Any) -> str:
    return str(page.locator("#decided").inner_text())


def until(holds: Callable[[], bool]) -> None:
    """Wait, since scrolling is animated."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def downloaded(page: Any, path: Path) -> list[list[str]]:
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download choices.csv").click()
    assert waiting.value.suggested_filename == "choices.csv"
    waiting.value.save_as(path)
    with open(path, encoding="utf-8", newline="") as handle:
        return list(csv.reader(handle))


def focused(page: Any) -> int | None:
    """Place of the card that has the focus."""
    return page.evaluate("[...document.querySelectorAll('.card')].indexOf(document.activeElement)")


def flagged(errors: LabelErrors) -> list[int]:
    return [i for i in errors.order.tolist() if errors.is_wrong[i]]


# --- deciding ---------------------------------------------------------------------------------------------


def test_buttons_decide_and_the_choices_change_the_labels(
    open_page: Callable[..., Any], page_file: Path, errors: LabelErrors, tmp_path: Path
) -> None:
    page = open_page(page_file)
    shown = flagged(errors)
    assert names(page) == [f"photos/{i}.png" for i in shown[:PER_PAGE]]
    assert decided(page) == f"0 of {len(shown)} decided"
    card = page.locator(".card")
    given = [CLASSES[errors.labels[i]] for i in shown]
    suggested = [CLASSES[errors.suggested[i]] for i in shown]
    card.nth(0).get_by_role("button", name=f"Keep {given[0]}").click()
    card.nth(1).get_by_role("button", name=f"Change to {suggested[1]}").click()
    card.nth(2).get_by_role("button", name="Drop").click()
    third = next(name for name in CLASSES if name not in (given[3], suggested[3]))
    card.nth(3).get_by_role("combobox").focus()
    card.nth(3).get_by_role("combobox").select_option(third)
    card.nth(4).get_by_role("button", name="Drop").click()
    card.nth(4).get_by_role("button", name="Drop").click()  # pressed again: undecided
    assert decided(page) == f"4 of {len(shown)} decided"
    assert card.locator(".decision").all_inner_texts()[:5] == [
        *("✓ kept", f"→ {suggested[1]}", "✕ dropped", f"→ {third}", "")
    ]
    pressed = card.nth(1).locator("button[aria-pressed=true]")
    assert pressed.count() == 1
    assert suggested[1] in pressed.inner_text()

    rows = downloaded(page, tmp_path / "choices.csv")
    ids = [f"photos/{i}.png" for i in shown[:4]]
    assert rows[0] == ["path", "given_label", "decision", "new_label"]
    assert sorted(rows[1:]) == sorted(
        [
            [ids[0], given[0], "keep", ""],
            [ids[1], given[1], "change", suggested[1]],
            [ids[2], given[2], "drop", ""],
            [ids[3], given[3], "change", third],
        ]
    )
    page.reload()
    assert card.nth(3).get_by_role("combobox").input_value() == str(CLASSES.index(third))

    folder = tmp_path / "audit"
    all_names = [f"photos/{i}.png" for i in range(COUNT)]
    errors.to_csv(folder / "label_errors.csv", class_names=CLASSES, names=all_names)
    choices = read_choices(tmp_path / "choices.csv", folder)
    assert choices == {
        ids[0]: LabelChoice(given[0], given[0]),
        ids[1]: LabelChoice(given[1], suggested[1]),
        ids[2]: LabelChoice(given[2], None),
        ids[3]: LabelChoice(given[3], third),
    }
    with open(write_corrected(folder, choices), encoding="utf-8", newline="") as handle:
        corrected = {row["path"]: row["label"] for row in csv.DictReader(handle)}
    truth = {name: CLASSES[errors.labels[i]] for i, name in enumerate(all_names)}
    assert corrected == truth | {ids[1]: suggested[1], ids[2]: "", ids[3]: third}


def test_keys_move_decide_and_undo(
    open_page: Callable[..., Any], page_file: Path, errors: LabelErrors
) -> None:
    page = open_page(page_file)
    shown = flagged(errors)
    key = page.keyboard.press
    page.evaluate("scrollTo(0, 0)")
    key("y")  # the first card is selected, and below the window: nothing is decided that cannot be seen
    assert decided(page).startswith("0 of")
    assert focused(page) == 0
    for pressed, place in (("ArrowRight", 1), ("j", 2), ("k", 1), ("ArrowLeft", 0), ("ArrowLeft", 0)):
        key(pressed)
        assert focused(page) == place
    key("ArrowDown")
    columns = focused(page)
    assert columns is not None and columns > 1  # noqa: PT018
    key("ArrowUp")
    for pressed in ("y", "n", "d", "2", "1"):
        key(pressed)
    assert focused(page) == 5

    def choice(place: int) -> str:
        return str(page.locator(".card .decision").nth(place).inner_text())

    def expected(i: int, label: int) -> str:
        return "✓ kept" if label == errors.labels[i] else f"→ {CLASSES[label]}"

    second = [int(np.argsort(-errors.clean_probs[i], kind="stable")[1]) for i in shown]
    assert [choice(place) for place in range(6)] == [
        f"→ {CLASSES[errors.suggested[shown[0]]]}",
        "✓ kept",
        "✕ dropped",
        expected(shown[3], second[3]),
        expected(shown[4], int(errors.suggested[shown[4]])),
        "",
    ]
    key("u")
    key("u")
    assert (focused(page), choice(3), choice(4)) == (3, "", "")
    assert decided(page).startswith("3 of")
    key("n")
    for _ in range(60):
        key("j")
    assert focused(page) == 4  # of the second page
    assert names(page)[0] == f"photos/{shown[PER_PAGE]}.png"
    page.locator("#search").focus()
    page.keyboard.type("dnyu")  # letters of a search are no decisions
    assert decided(page).startswith("4 of")


def test_a_key_decides_once_with_caps_lock_and_held_down(
    open_page: Callable[..., Any], page_file: Path, errors: LabelErrors
) -> None:
    page = open_page(page_file)
    press = (
        "([key, repeat]) => document.activeElement.dispatchEvent("
        "new KeyboardEvent('keydown', { key, repeat, bubbles: true, cancelable: true }))"
    )
    page.locator(".card").nth(0).focus()
    for key, repeat in (("N", False), ("N", True), ("n", True), ("D", False)):
        page.evaluate(press, [key, repeat])
    shown = page.locator(".card .decision")
    assert shown.all_inner_texts()[:3] == ["✓ kept", "✕ dropped", ""]
    page.evaluate(press, ["u", False])
    page.evaluate(press, ["U", True])
    assert shown.all_inner_texts()[:3] == ["✓ kept", "", ""]
    page.evaluate(press, ["ArrowRight", True])  # to move on may be repeated
    assert focused(page) == 2


def test_what_was_decided_and_undone_is_said(
    open_page: Callable[..., Any], page_file: Path, errors: LabelErrors, tmp_path: Path
) -> None:
    page = open_page(page_file)
    first, second = (f"photos/{i}.png" for i in flagged(errors)[:2])
    status = page.locator("#status")
    page.locator(".card").nth(0).get_by_role("button", name="Drop").click()
    assert status.inner_text() == f"{first}: ✕ dropped."
    page.locator(".card").nth(0).get_by_role("button", name="Drop").click()
    assert status.inner_text() == f"{first}: undecided."
    page.locator(".card").nth(1).get_by_role("button", name="Drop").click()
    page.locator("#undo").click()
    assert status.inner_text() == f"Undone: {second}."
    page.locator("#state").select_option("drop")
    page.locator("#undo").click()
    assert status.inner_text() == f"Undone: {first}, which the filters hide."
    given = [CLASSES[errors.labels[i]] for i in flagged(errors)[:2]]
    with open(tmp_path / "choices.csv", "w", encoding="utf-8", newline="") as handle:
        csv.writer(handle).writerows(
            [
                ("path", "given_label", "decision", "new_label"),
                (first, given[0], "keep", ""),
                (second, given[1], "drop", ""),
            ]
        )
    page.locator("#clear").click()
    page.locator("#file").set_input_files(tmp_path / "choices.csv")
    page.locator("#undo:enabled").click()
    assert status.inner_text() == f"Undone: {first} and 1 more."


def test_after_a_choice_with_the_mouse_keys_go_to_the_next_card(
    open_page: Callable[..., Any], page_file: Path
) -> None:
    """So that no key changes what was just decided. A button that a key pressed keeps the focus."""
    page = open_page(page_file)
    card = page.locator(".card")
    card.nth(4).get_by_role("button", name="Keep").click()
    assert focused(page) == 5
    page.keyboard.press("d")
    assert card.locator(".decision").all_inner_texts()[4:7] == ["✓ kept", "✕ dropped", ""]
    card.nth(7).get_by_role("button", name="Drop").focus()
    page.keyboard.press("Enter")
    assert focused(page) == -1
    last = card.nth(PER_PAGE - 1)
    last.get_by_role("button", name="Drop").click()
    assert focused(page) == PER_PAGE - 1  # the next one is on another page
    for place, by_mouse in ((1, True), (2, False)):
        other = card.nth(place).get_by_role("combobox")
        other.focus()
        if by_mouse:
            other.dispatch_event("pointerdown")
        else:
            page.keyboard.press("Shift")
        other.select_option(index=2)
        assert focused(page) == (place + 1 if by_mouse else -1)
    page.keyboard.press("Escape")
    assert focused(page) == 2


def test_the_first_card_is_selected_without_a_click(open_page: Callable[..., Any], page_file: Path) -> None:
    """At the start and after filtering, visibly."""
    page = open_page(page_file)

    def outlined() -> list[int]:
        return page.evaluate(  # type: ignore[no-any-return]
            "[...document.querySelectorAll('.card')].flatMap((card, place) => "
            "getComputedStyle(card).outlineStyle === 'solid' ? [place] : [])"
        )

    assert (focused(page), outlined()) == (-1, [0])
    page.locator(".card").nth(0).scroll_into_view_if_needed()
    page.keyboard.press("n")
    assert page.locator(".card .decision").nth(0).inner_text() == "✓ kept"
    assert (focused(page), outlined()) == (1, [1])
    page.locator("#state").select_option("undecided")  # as by keys, which stay with the list
    assert (focused(page), outlined()) == (-1, [0])
    page.locator("#state").dispatch_event("pointerdown")
    page.locator("#state").select_option("")
    assert (focused(page), outlined()) == (0, [0])
    page.locator("#search").focus()
    page.keyboard.type("photos")
    page.keyboard.press("Enter")
    assert (focused(page), outlined()) == (0, [0])
    page.locator('.map .cell[data-given="1"][data-suggested="0"]').click()
    assert (focused(page), outlined()) == (0, [0])


def test_choices_outlive_the_page_and_belong_to_the_audit(
    open_page: Callable[..., Any], page_file: Path, errors: LabelErrors, tmp_path: Path
) -> None:
    page = open_page(page_file)
    page.locator(".card").nth(1).focus()
    page.keyboard.press("d")
    before = page.locator(".card .decision").all_inner_texts()
    page.reload()
    assert page.locator(".card .decision").all_inner_texts() == before
    assert before[:3] == ["", "✕ dropped", ""]
    page.close()
    again = open_page(page_file)
    assert decided(again).startswith("1 of")
    other = open_page(make_page(tmp_path / "page.html", make_errors(share=0.3)))
    assert decided(other).startswith("0 of")


def test_choices_are_of_the_data_and_not_of_an_audit(
    open_page: Callable[..., Any], page_file: Path, errors: LabelErrors, tmp_path: Path
) -> None:
    """The page of another audit of the same data, with other probabilities and fewer examples."""
    page = open_page(page_file)
    first, second, *_, last = flagged(errors)
    for row in (first, last):
        page.get_by_label("Search").fill(f"photos/{row}.png")
        page.locator(".card").nth(0).get_by_role("button", name="Drop").click()
    wrong = errors.wrong_probability.copy()
    wrong[second] = 0.51
    again = replace(errors, wrong_probability=wrong)
    other = open_page(make_page(tmp_path / "page.html", again, most=5))
    assert decided(other) == "1 of 5 decided"
    assert other.locator(".card .decision").nth(0).inner_text() == "✕ dropped"
    assert other.locator("#status").inner_text().startswith("1 of the choices that this browser remembers")
    other.locator(".card").nth(1).get_by_role("button", name="Drop").click()
    page.reload()
    assert decided(page).startswith("3 of")  # the one that the other page does not show is still there


def test_a_browser_that_forgets_says_so(
    open_page: Callable[..., Any], page_file: Path, tmp_path: Path, errors: LabelErrors
) -> None:
    page = open_page(page_file)
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('no space'); }; }")
    status, lost = page.locator("#status.error"), "This browser does not remember choices"
    page.locator(".card").nth(0).get_by_role("button", name="Drop").click()
    status.get_by_text(lost).wait_for()
    downloaded(page, tmp_path / "choices.csv")
    page.locator("#file").set_input_files(tmp_path / "choices.csv")
    status.get_by_text(f"1 choice loaded. {lost}").wait_for()
    page.locator("#undo").click()
    status.get_by_text(f"Undone: photos/{flagged(errors)[0]}.png. {lost}").wait_for()


def test_arrows_scroll_what_can_be_scrolled(open_page: Callable[..., Any], tmp_path: Path) -> None:
    errors = make_errors(30)
    texts = TextExamples(["a long text\n" * 40] * 30)
    page = open_page(make_page(tmp_path / "page.html", errors, texts))
    box = page.locator(".card .content").first
    assert box.get_attribute("tabindex") == "0"
    box.focus()
    page.keyboard.press("ArrowDown")
    until(lambda: box.evaluate("node => node.scrollTop") > 0)
    page.set_viewport_size({"width": 400, "height": 800})
    region = page.locator(".scroll[aria-label='Map of confusions']")
    region.focus()
    page.keyboard.press("ArrowRight")
    until(lambda: region.evaluate("node => node.scrollLeft") > 0)
    assert focused(page) == -1


def test_two_tabs_do_not_overwrite_each_other(open_page: Callable[..., Any], page_file: Path) -> None:
    first, second = open_page(page_file), open_page(page_file)
    for place, page in enumerate((first, second, first)):
        page.locator(".card").nth(place).get_by_role("button", name="Drop").click()
        for tab in (first, second):
            tab.wait_for_function(f"decided.textContent.startsWith('{place + 1} of')")
    second.reload()
    assert decided(second).startswith("3 of")


def test_a_downloaded_file_can_be_loaded(
    open_page: Callable[..., Any], page_file: Path, errors: LabelErrors, tmp_path: Path, browser: Any
) -> None:
    page = open_page(page_file)
    page.locator(".card").nth(0).focus()
    for pressed in ("y", "n", "d", "2"):
        page.keyboard.press(pressed)
    rows = downloaded(page, tmp_path / "choices.csv")
    wanted = page.locator(".card .decision").all_inner_texts()
    page.evaluate("localStorage.clear()")
    page.reload()
    assert decided(page).startswith("0 of")
    page.locator("#file").set_input_files(tmp_path / "choices.csv")
    page.get_by_text("4 choices loaded.").wait_for()
    assert page.locator(".card .decision").all_inner_texts() == wanted
    assert downloaded(page, tmp_path / "again.csv") == rows
    page.get_by_role("button", name="Undo").click()
    assert decided(page).startswith("0 of")

    heading, good = rows[0], rows[1]
    for bad, message in (
        ([heading[1:], good[1:]], "the file has no column path"),
        ([heading, [good[0], "snake", "keep", ""]], "is " + good[1] + " here, not snake"),
        ([heading, good, [*rows[2][:2], "change", "snake"]], "unknown class snake"),
        ([heading, good, [*rows[2][:2], "burn", ""]], "unknown decision burn"),
        ([[";".join(heading)], [";".join(good)]], "columns are separated by commas"),
        ([heading, [*rows[2][:2], "keep", "dog"]], "the decision is keep but there is a new_label, dog"),
        ([heading, [*rows[2][:2], "drop", "dog"]], "the decision is drop but there is a new_label, dog"),
        ([heading, [*good[:2], "keep", ""], [*good[:2], "drop", ""]], "two decisions about this example"),
    ):
        with open(tmp_path / "bad.csv", "w", encoding="utf-8", newline="") as handle:
            csv.writer(handle).writerows(bad)
        page.locator("#file").set_input_files(tmp_path / "bad.csv")
        page.locator("#status.error").get_by_text(message).wait_for()
        assert "Nothing was loaded" in page.locator("#status").inner_text()
        assert decided(page).startswith("0 of")
    (tmp_path / "bad.csv").write_bytes((",".join(heading) + "\nf\xfcr.png,cat,drop,\n").encode("latin-1"))
    page.locator("#file").set_input_files(tmp_path / "bad.csv")
    page.locator("#status.error").get_by_text("the file is not text in UTF-8").wait_for()
    text = (
        "\ufeff"
        + ",".join(heading)
        + f'\r\n"{good[0]}","{good[1]}",drop,""\r\nelsewhere,cat,drop,\r\n,,,\r\n'
    )
    (tmp_path / "spreadsheet.csv").write_text(text.replace('fish "quoted"', 'fish ""quoted""'), newline="")
    page.locator("#file").set_input_files(tmp_path / "spreadsheet.csv")
    page.get_by_text("1 choice loaded. 1 are of examples that are not on this page.").wait_for()
    assert downloaded(page, tmp_path / "last.csv")[1:] == [[*good[:2], "drop", ""]]


# --- finding ----------------------------------------------------------------------------------------------


def test_filters_sorting_and_search(
    open_page: Callable[..., Any], page_file: Path, errors: LabelErrors
) -> None:
    page = open_page(page_file)
    shown, listed = flagged(errors), errors.order.tolist()
    listed = listed[: max(100, int((errors.wrong_probability > 0.01).sum()))]

    def check(expected: list[int]) -> None:
        assert names(page) == [f"photos/{i}.png" for i in expected[:PER_PAGE]]
        assert page.locator(".range").first.inner_text().endswith(f"of {len(expected):,}")

    def choose(name: str, value: str) -> None:
        page.locator(f"select#{name}").select_option(value)

    choose("which", "all")
    check(listed)
    choose("given", "1")
    check([i for i in listed if errors.labels[i] == 1])
    choose("suggested", "0")
    check([i for i in listed if errors.labels[i] == 1 and errors.suggested[i] == 0])
    page.get_by_role("button", name="Clear").click()
    check(shown)
    choose("sort", "name")
    check(sorted(shown))  # 9.png before 10.png
    choose("sort", "class")
    check(sorted(shown, key=lambda i: (errors.labels[i], shown.index(i))))
    choose("sort", "suspicion")
    page.get_by_label("Search").fill("PHOTOS/1")
    check([i for i in shown if str(i).startswith("1")])
    page.get_by_label("Search").fill("no such name")
    check([])
    assert page.get_by_text("No example fits these filters.").is_visible()
    page.get_by_label("Search").fill("")
    page.locator(".card").nth(0).focus()
    for pressed in ("n", "d", "y"):
        page.keyboard.press(pressed)
    for state, expected in (("keep", shown[:1]), ("drop", shown[1:2]), ("change", shown[2:3])):
        choose("state", state)
        check(expected)
    choose("state", "undecided")
    check(shown[3:])
    page.locator(".card").nth(0).get_by_role("button", name="Drop").click()
    check(shown[3:])  # a card that was just decided stays, so that it can be seen
    page.get_by_role("button", name="Next").first.click()
    assert names(page)[0] == f"photos/{shown[3 + PER_PAGE]}.png"
    page.get_by_role("button", name="Previous").last.click()
    check(shown[3:])
    pair = page.locator(".pairs button").first
    given, suggested = (int(pair.get_attribute(f"data-{name}")) for name in ("given", "suggested"))
    pair.click()
    check([i for i in shown if (errors.labels[i], errors.suggested[i]) == (given, suggested)])
    choose("which", "all")
    page.locator(f'.classes button[data-given="{given}"]').click()  # what is shown stays
    check([i for i in listed if errors.labels[i] == given])
    choose("which", "flagged")
    pair.click()
    name, number = CLASSES[given], sum(errors.labels[i] == given for i in shown)
    assert page.locator("#given option:checked").inner_text() == f"{name} ({number})"
    unflagged = next(
        pair
        for pair in ((given, true) for given in range(4) for true in range(4) if given != true)
        if not any((errors.labels[i], errors.suggested[i]) == pair for i in shown)
    )
    page.locator(f'.map .cell[data-given="{unflagged[0]}"][data-suggested="{unflagged[1]}"]').click()
    check([i for i in listed if (errors.labels[i], errors.suggested[i]) == unflagged])
    assert page.locator("#which").input_value() == "all"
    choose("which", "flagged")
    assert page.locator("#suggested option:checked").inner_text().startswith(CLASSES[unflagged[1]])


@pytest.mark.slow
def test_five_thousand_examples(open_page: Callable[..., Any], tmp_path: Path) -> None:
    errors = make_errors(5000, 100)
    errors.wrong_probability[:] = np.random.default_rng(0).uniform(0.4, 1, size=5000)
    classes = [f"class {k}" for k in range(100)]
    file = make_page(tmp_path / "page.html", errors, class_names=classes)
    assert file.stat().st_size < 15e6
    page = open_page(file)
    assert page.locator("#decided").inner_text() == f"0 of {int(errors.is_wrong.sum()):,} decided"
    page.locator("#which").select_option("all")
    assert page.locator(".range").first.inner_text() == "1–60 of 5,000"
    assert page.locator(".card").count() == PER_PAGE
    assert page.evaluate("document.querySelectorAll('*').length") < 5000
    page.get_by_label("Search").fill("photos/4321.png")
    assert names(page) == ["photos/4321.png"]
    page.locator("#search").fill("")
    page.locator("#sort").select_option("name")
    for _ in range(3):
        page.get_by_role("button", name="Next").first.click()
    assert names(page)[0] == "photos/180.png"
    assert page.locator(".card").count() == PER_PAGE
    assert page.locator(".card option").count() == PER_PAGE  # classes are listed where a list is opened


# --- showing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [TextExamples([HOSTILE] * 30), TableExamples([{HOSTILE: HOSTILE}] * 30)])
def test_hostile_names_are_inert(open_page: Callable[..., Any], examples: Any, tmp_path: Path) -> None:
    errors = make_errors(30)
    classes = [f"{HOSTILE}{k}" for k in range(4)]
    paths = [f"{HOSTILE}{i}" for i in range(30)]
    changes = {"class_names": classes, "names": paths, "title": HOSTILE, "notes": [HOSTILE]}
    page = open_page(make_page(tmp_path / "page.html", errors, examples, **changes))
    first = errors.order[0]
    assert names(page)[0] == paths[first]
    page.locator(".card").nth(0).focus()
    page.keyboard.press("y")
    page.locator(".card select").first.focus()
    assert page.locator("img").count() == 0
    assert HOSTILE in page.locator(".content").first.inner_text()
    assert page.title() == HOSTILE
    assert downloaded(page, tmp_path / "choices.csv")[1] == [
        *(paths[first], classes[errors.labels[first]], "change", classes[errors.suggested[first]])
    ]


def test_the_policy_stops_scripts_and_requests(browser: Any, page_file: Path) -> None:
    """Were a name taken for code after all."""
    page = browser.new_page()
    page.goto(page_file.as_uri())
    requests: list[Any] = []
    page.on("request", lambda request: requests.append(request))  # it takes no builtin
    page.evaluate(
        """() => {
            document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='document.title = 1'>");
            const script = Object.assign(document.createElement("script"), {text: "document.title = 2"});
            document.body.append(script);
            return fetch("https://example.org").catch(() => 0);
        }"""
    )
    page.wait_for_timeout(100)
    assert page.title() == "Audit of photos"
    assert [(request.url, request.failure) for request in requests if request.failure != "csp"] == []
    page.close()


@pytest.mark.parametrize("kind", ["text", "table", "image"])
def test_every_kind_of_example_is_shown(kind: str, open_page: Callable[..., Any], tmp_path: Path) -> None:
    errors = make_errors(30)
    texts = [f"What arrived\nwas number {i}." for i in range(30)]
    kinds = {"text": TextExamples(texts), "table": TableExamples({"number": list(range(30)), "text": texts})}
    numbers = {"key": "index", "names": [str(i) for i in range(30)]}
    page = open_page(make_page(tmp_path / "page.html", errors, kinds.get(kind), **numbers))
    first = flagged(errors)[0]
    card = page.locator(".card").first
    if kind == "image":
        page.wait_for_function("[...document.images].every((image) => image.naturalWidth === 32)")
        image = card.locator("img")
        assert image.evaluate("node => getComputedStyle(node).imageRendering") == "pixelated"
        assert image.bounding_box()["width"] > 90
    elif kind == "text":
        assert card.locator(".content").inner_text() == texts[first]
    else:
        assert card.locator("tr").all_inner_texts()[0].split() == ["number", str(first)]
    if kind != "image":
        page.get_by_label("Search").fill(f"was number {first}.")
        assert names(page) == [str(first)]
    card.focus()
    page.keyboard.press("n")
    rows = downloaded(page, tmp_path / "choices.csv")
    assert rows == [
        ["index", "given_label", "decision", "new_label"],
        [str(first), CLASSES[errors.labels[first]], "keep", ""],
    ]


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window(
    width: int, open_page: Callable[..., Any], page_file: Path, tmp_path: Path
) -> None:
    long = [f"{'a very long name of a class ' * 4}{k}" for k in range(4)]
    for file in (page_file, make_page(tmp_path / "page.html", make_errors(70), class_names=long)):
        page = open_page(file)
        page.set_viewport_size({"width": width, "height": 800})
        page.locator(".card").nth(0).focus()
        page.keyboard.press("y")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        cards = page.evaluate(
            "[...document.querySelectorAll('.card > *')].map((n) => n.getBoundingClientRect().right)"
        )
        assert max(cards) <= width
