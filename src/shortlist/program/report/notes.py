"""What a reader must know to read each part, and no more: nothing about seeds where there is one, for instance."""

from shortlist.program.report.gather import Comparison


class Notes:
    """The sentences under the headings."""

    def __init__(self, comparison: Comparison) -> None:
        runs = {len(setup.finished) for setup in comparison.finished}
        self._several_seeds = any(count > 1 for count in runs)
        self._single_seeds = 1 in runs
        self._all_shown = len(comparison.leading) == len(comparison.finished)
        self._several = len(comparison.finished) > 1
        self._k = comparison.suggestions_shown

    @property
    def results(self) -> str:
        return _sentences(
            "Accuracy on the test images in percent, with the weights of the epoch that did best on the validation "
            "images.",
            self._several_seeds and "Where there are several seeds: mean ± standard deviation.",
            self._several and "The best of each column is bold.",
        )

    @property
    def accuracy_against_k(self) -> str:
        return _sentences("How often the right class is among the first K suggestions.", self._shaded)

    @property
    def accuracy_against_size(self) -> str:
        return _sentences(
            "Mean accuracy of the classes with about as many training images. Grey bars: how many classes those are.",
            self._shaded,
        )

    @property
    def learning_curves(self) -> str:
        return _sentences(self._single_seeds and "A ring marks the epoch whose weights were kept.", self._shaded)

    @property
    def confusions(self) -> str:
        return _sentences(
            "The left class is taken for the right one. Mistaken: share of its test images with the right one as first "
            f"suggestion. Still in {self._k}: share of those whose true class is among their {self._k} suggestions "
            "all the same.",
            self._chosen,
        )

    @property
    def examples(self) -> str:
        return _sentences(
            "Chosen by their labels alone, so the same for all runs on this data.",
            self._several_seeds and "Where there are several seeds: the lowest.",
            self._chosen,
        )

    @property
    def _shaded(self) -> str | bool:
        return self._several_seeds and "Shaded: one standard deviation over seeds."

    @property
    def _chosen(self) -> str | bool:
        return not self._all_shown and "Only the set-ups with the highest macro accuracy are shown."


def _sentences(*sentences: str | bool) -> str:
    return " ".join(sentence for sentence in sentences if isinstance(sentence, str))
