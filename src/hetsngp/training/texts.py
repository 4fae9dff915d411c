"""Texts as a kind of input of recipes: their data, their network with its tokenizer, and their batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, distributed

from hetsngp.conversion.conversion import convert
from hetsngp.data.images.copies import image_folds
from hetsngp.data.text.loader import TextLoader
from hetsngp.data.text.preprocessing import TextPreprocessing
from hetsngp.data.text.sources import has_split, open_texts
from hetsngp.data.text.texts import LabelledTexts
from hetsngp.data.text.tokenizer import TextTokenizer
from hetsngp.models.classifier import Classifier
from hetsngp.pretrained.text_features import text_features
from hetsngp.pretrained.text_networks import PretrainedTextNetwork, pretrained_text_network
from hetsngp.training.input_kinds import FrozenModel, InputKind, Loaders, TaskData
from hetsngp.training.recipes.task import TextTask

EVAL_BATCH = 256
"""Texts of a batch in evaluation."""


class TextInputs(InputKind):
    """Texts with one class each."""

    examples = "texts"
    task: TextTask

    def open(self, spec: str, split: str) -> LabelledTexts:
        columns: dict[str, Any] = {"text": self.task.text_column, "label": self.task.label_column}
        return open_texts(spec, split, **columns, say=_say if split == "train" else lambda sentence: None)

    def has_test(self, spec: str) -> bool:
        return has_split(spec, "test")

    def own_held_out(self, spec: str) -> LabelledTexts | None:
        return self.open(spec, "val") if has_split(spec, "val") else None

    def has_one_label(self, examples: Any) -> bool:
        return True

    def folds(self, examples: LabelledTexts, folds: int, seed: int) -> list[Tensor]:
        return image_folds(examples, folds, seed)

    def prepare(self, examples: LabelledTexts, task: TextTask) -> LabelledTexts:
        if examples.num_classes < 2:
            raise ValueError(
                f"all texts of {task.data} have the class {examples.class_names[0]!r}: a classifier needs "
                "two or more; name another column of classes, --set label_column=…"
            )
        return examples

    def make_model(self, task: TextTask, data: TaskData) -> tuple[Classifier, TextTokenizer]:
        network = self.network(task)
        model = convert(
            network.encoder, task.method, num_classes=data.num_classes, copy=False, **dict(task.options)
        )
        return model, network.tokenizer

    def make_loaders(
        self, task: TextTask, data: TaskData, asked: TextTokenizer, *, seed: int, processes: int
    ) -> Loaders:
        inputs = self.inputs(data, asked)
        tokens = asked.encode(data.train)
        if tokens.truncated:
            _say(asked.note_on_cut(tokens.truncated, len(tokens)))
        train = TextLoader(tokens, task.batch_size, shuffle=True, seed=seed)
        held_out, test = (
            None if texts is None else inputs.loader(texts, EVAL_BATCH)
            for texts in (data.held_out, data.test)
        )
        return Loaders(train, train.clean(), held_out, test, inputs)

    def frozen_model(self, task: TextTask, data: TaskData) -> FrozenModel:
        network = self.network(task)
        model = convert(
            network.encoder,
            num_classes=data.num_classes,
            freeze=True,
            copy=False,
        )

        def features(texts: LabelledTexts, folder: Path, show: bool) -> Tensor:
            return text_features(texts, network, folder, batch_size=task.batch_size, show=show)

        return FrozenModel(model, self.inputs(data, network.tokenizer), features)

    @staticmethod
    def network(task: TextTask) -> PretrainedTextNetwork:
        """Network and tokenizer of a task."""
        return pretrained_text_network(task.network, max_length=task.max_length, weights=task.pretrained)

    @staticmethod
    def inputs(data: TaskData, tokenizer: TextTokenizer) -> TextPreprocessing:
        """Preprocessing that is saved with the model."""
        columns = data.train.columns
        names = () if columns is None else (columns.text, columns.label)
        return TextPreprocessing(tokenizer, data.train.class_names, *names)


def _say(sentence: str) -> None:
    """Print a sentence, in one of several processes."""
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        print(sentence)
