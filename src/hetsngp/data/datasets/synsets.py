"""Classes of the ImageNet family: WordNet's numbers (wnids) in the order of timm's lists, and names."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hetsngp.validation import check_choice

WNID = re.compile(r"n\d{8}")
LISTS = {
    "imagenet": "imagenet_synsets.txt",
    "imagenet-a": "imagenet_a_synsets.txt",
    "imagenet-r": "imagenet_r_synsets.txt",
    "imagenet21k": "imagenet21k_goog_synsets.txt",
    "imagenet22k": "imagenet22k_synsets.txt",
}
"""Files with 1,000, 200, 200 and 21,843 classes. The last has the 21,841 of the release of 2011, which
numbers in timm's shards index; it lacks two of the 21,843, so numbers after the first of these differ."""
SUBSETS = ("imagenet-a", "imagenet-r")
"""Sets with some of the 1,000 classes."""


@cache
def wnids(name: str) -> tuple[str, ...]:
    """Classes of the set ``name``; the index of each is its label."""
    return tuple(_read(LISTS[check_choice("list of classes", name, LISTS)]).split())


@cache
def class_names(name: str) -> tuple[str, ...]:
    """Unique name of each class: WordNet's first word, with the wnid where several classes share it.

    Examples are "tench" and "crane (n02012849)". ImageNet-A and -R have the names of the 1,000 classes.
    """
    if name in SUBSETS:
        known = dict(zip(wnids("imagenet"), class_names("imagenet"), strict=True))
        return tuple(known[wnid] for wnid in wnids(name))
    lines = _read("imagenet_synset_to_lemma.txt").splitlines()
    words = {wnid: words.split(",")[0].strip() for wnid, _, words in (line.partition("\t") for line in lines)}
    firsts = [words.get(wnid, wnid) for wnid in wnids(name)]
    shared = Counter(firsts)
    both = zip(wnids(name), firsts, strict=True)
    return tuple(first if shared[first] == 1 else f"{first} ({wnid})" for wnid, first in both)


def _read(file: str) -> str:
    # timm has an API for three of the five lists only, and importing it takes seconds; the files do not.
    spec = find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the class lists of ImageNet come with timm: pip install 'hetsngp[vision]'")
    path = Path(spec.submodule_search_locations[0]) / "data" / "_info" / file
    if not path.is_file():
        raise ImportError(f"this timm has no file {path}: pip install --upgrade 'hetsngp[vision]'")
    return path.read_text(encoding="utf-8")
