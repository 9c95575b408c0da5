"""The tensors of an image from which each parameter of a transformers model comes.

Most have the same name. Transformers stores some models under other names than its modules have, and merges
the experts of a layer into one parameter when it loads them: its own table of conversions is used for both.
Where the parts lie in the image as the whole needs them, it is one view.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from invoker.engine.contract import UnsupportedModel
from invoker.engine.image_views import ImageViews, check_names, set_tensor


@dataclass(slots=True)
class _Merge:
    """Tensors that a converter makes into one parameter, or into several."""

    converter: WeightConverter
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # by pattern

    @property
    def in_order(self) -> list[str]:
        """The names in the order in which they would have to lie in the image: part by part."""
        columns = [self.names[pattern] for pattern in self.converter.source_patterns]
        return [name for row in zip(*columns, strict=True) for name in row]

    @property
    def is_complete(self) -> bool:
        """Whether each pattern has as many parts as the others."""
        return len({len(self.names[pattern]) for pattern in self.converter.source_patterns}) == 1

    def stacks(self) -> bool:
        """Return whether the converter only stacks parts: of experts, each gate over up."""
        operations = self.converter.operations
        merged = bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        joined = all(isinstance(one, Concatenate) and one.dim == 1 for one in operations[1:])
        return merged and joined


class TensorSources:
    """The sources of the parameters of `model`, complete and without layers cut off.

    Raises UnsupportedModel unless the image has all tensors of the model, and no others. With `tied` it has
    no head: that is the embedding.
    """

    def __init__(self, model: PreTrainedModel, names: Collection[str], *, tied: bool) -> None:
        transforms = get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        state = model.state_dict()
        self._model = model
        self._same: dict[str, str] = {}
        self._merged: dict[str, _Merge] = {}
        unknown = []
        for name in sorted(names, key=_natural):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
            if target not in state:
                unknown.append(name)
            elif pattern is None:
                self._same[target] = name
            else:
                self._add_part(of_pattern[pattern], pattern, target, name)
        if tied:
            self._tie(model)
        complete = (target for target, merge in self._merged.items() if merge.is_complete)
        check_names(state, {*self._same, *complete, *unknown})

    def bind(
        self, owner: nn.Module, attribute: str, target: str, views: ImageViews
    ) -> Callable[[], None] | None:
        """Replace a parameter or saved buffer by a view of the image.

        Where that cannot be, return a function that replaces it by a copy, once the bytes have arrived.
        """
        if target in self._same:
            views.bind(owner, attribute, self._same[target])
            return None
        merge = self._merged[target]
        shape, dtype = getattr(owner, attribute).shape, views.dtype
        if merge.stacks():
            items = sum(prod(views.entries[name].shape) for name in merge.in_order)
            if items != prod(shape):
                raise UnsupportedModel(f"{target} has {items} items, config.json implies {tuple(shape)}")
            if (whole := views.adjacent(merge.in_order, tuple(shape))) is not None:
                set_tensor(owner, attribute, whole)
                return None
        return lambda: set_tensor(owner, attribute, self._converted(merge, target, views).to(dtype))

    def names_of(self, target: str) -> Iterable[str]:
        """Return the tensors of the image from which a parameter comes."""
        return [self._same[target]] if target in self._same else self._merged[target].in_order

    def _add_part(self, converter: WeightConverter, pattern: str, target: str, name: str) -> None:
        merge = self._merged.get(target)
        if merge is None:
            merge = self._merged[target] = _Merge(converter)
            for other in converter.target_patterns[1:]:
                self._merged[target.replace(converter.target_patterns[0], other)] = merge
        merge.names[pattern].append(name)

    def _tie(self, model: PreTrainedModel) -> None:
        paths = {id(module): path for path, module in model.named_modules()}
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None:
            source = self._same.get(f"{paths[id(embedding)]}.weight")
            if source is not None:
                self._same.setdefault(f"{paths[id(head)]}.weight", source)

    def _converted(self, merge: _Merge, target: str, views: ImageViews) -> torch.Tensor:
        converter = merge.converter
        for pattern, names in merge.names.items():
            for name in names:
                converter.add_tensor(target, name, pattern, views.whole(name))
        found = converter.convert(target, model=self._model, config=self._model.config)
        tensor = found[target]
        made: torch.Tensor = tensor[0] if isinstance(tensor, list) else tensor
        return made


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key with which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
