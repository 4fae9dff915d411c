"""Which of a model's classes are those of a data set: by name, or by WordNet's number."""

from importlib.util import find_spec

import pytest

from hetsngp.data.class_maps import match_classes
from hetsngp.data.datasets.cifar_c import CLASS_NAMES
from hetsngp.data.datasets.synsets import class_names, wnids

needs_lists = pytest.mark.skipif(find_spec("timm") is None, reason="the class lists come with timm")


def test_the_same_classes_need_no_map() -> None:
    assert match_classes("a", ["cat", "dog"], "b", ("cat", "dog")) is None
    names = CLASS_NAMES["cifar10-c"]
    assert match_classes("cifar10n:worse", names, "cifar10", list(names)) is None


def test_by_name_and_in_another_order() -> None:
    found = match_classes("a", ["cat", "dog", "owl"], "b", ["owl", "eel", "cat"])
    assert found is not None
    assert found.index.tolist() == [2, -1, 0]
    assert found.class_names == ("owl", "eel", "cat")
    with pytest.raises(
        ValueError, match="no class of b, such as 'eel', is one of the model's, such as 'cat'"
    ):
        match_classes("a", ["cat", "dog"], "b", ["eel", "ant"])
    with pytest.raises(ValueError, match="such as 'unlabelled'"):
        match_classes("a", ["cat", "dog"], "photos", ["unlabelled"])


@needs_lists
@pytest.mark.parametrize(
    ("trained_on", "spec", "classes"),
    [
        ("imagenet", "imagenet-a", "imagenet-a"),
        ("imagenet", "imagenet-r", "imagenet-r"),
        ("imagenet21k", "imagenet", "imagenet"),
        ("imagenet21k", "imagenet-v2", "imagenet"),
        ("imagenet21k", "imagenet-c", "imagenet"),
        ("imagenet21k", "imagenet-r", "imagenet-r"),
    ],
)
def test_the_family_of_imagenet_by_wnid(trained_on: str, spec: str, classes: str) -> None:
    found = match_classes(trained_on, class_names(trained_on), spec, class_names(classes))
    assert found is not None
    place = {wnid: number for number, wnid in enumerate(wnids(trained_on))}
    assert found.index.tolist() == [place.get(wnid, -1) for wnid in wnids(classes)]
    # By their names some would be taken for others, or missed: a crane is a bird, and a machine.
    assert int((found.index < 0).sum()) == (1 if (trained_on, classes) == ("imagenet21k", "imagenet") else 0)


@needs_lists
def test_the_same_classes_of_two_sets_of_the_family() -> None:
    names = class_names("imagenet")
    assert match_classes("imagenet", names, "imagenet-v2", names) is None
    assert match_classes("imagenet", names, "imagenet-c", names) is None


@needs_lists
def test_a_set_that_is_called_as_one_of_the_family_but_has_other_classes() -> None:
    """A variant, or a folder of one's own: by name, as all others."""
    found = match_classes("imagenet", ["cat", "dog"], "imagenet-r", ["dog"])
    assert found is not None
    assert found.index.tolist() == [1]
