"""Labelled texts: in memory, from tables, files of JSON lines and Hugging Face's data sets, and as batches.

``texts``: ``LabelledTexts``. ``columns``: which column holds the texts and which the classes. ``files``: CSV,
Parquet, JSON lines, and objects of the package ``datasets``. ``sources``: ``open_texts``, by name or path.
``tokenizer`` and ``loader``: token numbers, and batches of similar length. ``preprocessing``: how texts
become batches, saved with a model.
"""

from hetsngp.data.text.files import read_texts, texts_from_columns, texts_from_datasets
from hetsngp.data.text.loader import TextLoader
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.data.text.tokenizer import TextTokenizer

__all__ = [
    "LabelledTexts",
    "TextLoader",
    "TextTokenizer",
    "read_texts",
    "texts_from_columns",
    "texts_from_datasets",
]
