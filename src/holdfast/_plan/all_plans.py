"""All ranks' save plans in one table: what they name alike, and what they describe together.

A million items are sorted and compared as tensors of numbers; none of them becomes an object.
"""

import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch

from holdfast._format.description import OBJECT, TENSOR, Description, column, concatenated, numbered
from holdfast._plan.metadata_entries import boxes_column, properties_in_words
from holdfast._plan.write_columns import SHARD, WriteColumns
from holdfast.errors import InvalidPlanError


class AllPlans:
    """The items of all ranks' plans: one row for each, rank after rank.

    Args:
        plans: The plans in rank order.
        keys: The first of the different keys, if their order is known; others follow as they are met.

    Attributes:
        keys: The different keys.
        forms: The different forms.
        offsets: The different offsets of chunks.
        rank: For each row its rank.
        position: Its number in that rank's plan.
        key: The number of its key.
        form: The number of its form in ``forms``; -1 for what is not a tensor.
        offset: The number of its offset in ``offsets``; -1 for what is not a tensor.
        order: The rows, sorted by key and offset.
        name: For each row in this order, a number that equals another row's if key and offset do.

    Raises:
        InvalidPlanError: Under one key some rows are tensors and some are not, or shapes or dtypes differ.
    """

    def __init__(self, plans: Sequence[WriteColumns], keys: Sequence[str] = ()) -> None:
        self.plans = plans
        key, form, offset = _Vocabulary(keys), _Vocabulary(), _Vocabulary()
        for plan in plans:
            key.add(plan.keys)
            form.add(plan.forms)
            offset.add(plan.offsets)
        self.keys, self.forms, self.offsets = list(key.numbers), list(form.numbers), list(offset.numbers)
        counts = torch.tensor([len(plan) for plan in plans], dtype=torch.int64, device="cpu")
        self.rank = torch.repeat_interleave(torch.arange(len(plans), device="cpu"), counts)
        ends = torch.cumsum(counts, 0)
        begins = torch.repeat_interleave(ends - counts, counts)
        self.position = torch.arange(len(self.rank), device="cpu") - begins
        self.key = key.look_up(self.rank, self.position)
        self.form = form.look_up(self.rank, _numbers([plan.form for plan in plans]))
        self.offset = offset.look_up(self.rank, _numbers([plan.offset for plan in plans]))
        name = self.key * (len(self.offsets) + 1) + self.offset + 1
        self.order = torch.argsort(name, stable=True)
        self.name = name[self.order]
        self._check_keys()

    def nbytes(self) -> torch.Tensor:
        """The bytes that each row writes, as far as they are known before it is written."""
        by_form = torch.tensor([*(form.nbytes for form in self.forms), 0], device="cpu")
        found = by_form[self.form]
        for rank, plan in enumerate(self.plans):
            if plan.nbytes:
                begin = int(torch.searchsorted(self.rank, rank))
                for position, nbytes in plan.nbytes.items():
                    found[begin + position] = nbytes
        return found

    def _check_keys(self) -> None:
        _, of_form = numbered((form.size, form.properties[0]) for form in self.forms)
        key = self.key[self.order]
        family = torch.tensor([*of_form, -1], device="cpu")[self.form][self.order]
        wrong = ((key[1:] == key[:-1]) & (family[1:] != family[:-1])).nonzero()
        if len(wrong):
            self._refuse(int(self.order[wrong[0]]), int(self.order[wrong[0] + 1]))

    def _refuse(self, one: int, other: int) -> None:
        key = self.keys[int(self.key[one])]
        ranks = f"ranks {int(self.rank[one])} and {int(self.rank[other])}"
        if int(self.form[one]) < 0 or int(self.form[other]) < 0:
            raise InvalidPlanError(
                f"{key}: {ranks} disagree: one rank saves a tensor, another something else", key=key
            )
        first, second = self.forms[int(self.form[one])], self.forms[int(self.form[other])]
        raise InvalidPlanError(
            f"{key}: shards disagree ({ranks}): {tuple(first.size)} of {first.properties[0]} and "
            f"{tuple(second.size)} of {second.properties[0]}",
            key=key,
        )

    def refuse_sizes(self, rows: list[int]) -> NoReturn:
        """Raise for rows that name one place and have chunks of different shapes there."""
        key = self.keys[int(self.key[rows[0]])]
        said: dict[tuple[int, ...], int] = {}
        for row in rows:
            said.setdefault(tuple(self.forms[int(self.form[row])].lengths), int(self.rank[row]))
        held = " and ".join(f"rank {rank} one of {lengths}" for lengths, rank in said.items())
        raise InvalidPlanError(
            f"{key}: ranks offer different chunks at one place: {held}. The tensor must be sharded in the "
            "same way on all ranks.",
            key=key,
        )

    def describe(self) -> tuple[Description, list["array[int]"]]:
        """Describe all that is written; and for each plan, number its items among the chunks of their keys.

        Raises:
            InvalidPlanError: Two rows have the same key and offset, and are not shards.
        """
        order = self.order
        self._refuse_doubles()
        key = self.key[order]
        begins = torch.searchsorted(key, torch.arange(len(self.keys), device="cpu"))
        hints = torch.empty_like(order)
        hints[order] = torch.arange(len(order), device="cpu") - begins[key]
        hints[self.form < 0] = -1
        first = self.form[order[begins]].tolist() if len(self.keys) else []
        tensors = [self.forms[number] for number in first if number >= 0]
        counts = torch.diff(begins, append=torch.tensor([len(order)], device="cpu")).tolist()
        properties, words = numbered(properties_in_words(*form.properties) for form in self.forms)
        chunks = order[self.form[order] >= 0]
        description = Description(
            keys=self.keys,
            kinds=bytes(OBJECT if number < 0 else TENSOR for number in first),
            properties=properties,
            tensor_properties=column([words[number] for number in first if number >= 0], "I"),
            tensor_ndims=bytes(len(form.size) for form in tensors),
            tensor_shapes=column(concatenated(form.size for form in tensors), "q"),
            tensor_chunks=column([c for c, n in zip(counts, first, strict=True) if n >= 0], "I"),
            chunk_offsets=boxes_column(self.offsets, self.offset[chunks]),
            chunk_lengths=boxes_column([form.lengths for form in self.forms], self.form[chunks]),
        )
        ends = [0, *itertools.accumulate(map(len, self.plans))]
        every = array("i", hints.tolist())
        return description, [every[a:b] for a, b in itertools.pairwise(ends)]

    def _refuse_doubles(self) -> None:
        same = (self.name[1:] == self.name[:-1]).nonzero().flatten()
        for at in same.tolist():
            for row in (int(self.order[at]), int(self.order[at + 1])):
                plan = self.plans[int(self.rank[row])]
                if plan.kinds[int(self.position[row])] != SHARD:
                    key = self.keys[int(self.key[row])]
                    raise InvalidPlanError(f"{key}: two items of the plan write this key", key=key)


class _Vocabulary:
    """The different words of many lists, numbered; and for each word of each list its number.

    Attributes:
        numbers: The words, in the order in which they came.
    """

    def __init__(self, words: Iterable[Any] = ()) -> None:
        self.numbers: dict[Any, int] = {word: number for number, word in enumerate(words)}
        self._before: list[Any] | None = None
        self._used: list[int] = []
        self._begin = 0
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, words: list[Any]) -> None:
        """Number the words of the next list."""
        # Ranks that hold shards of the same tensors have the same keys and forms.
        if self._before is None or self._before != words:
            numbers = self.numbers
            self._begin = len(self._used)
            self._used += [numbers.setdefault(word, len(numbers)) for word in words]
            self._used.append(-1)
            self._before = words
        self._begins.append(self._begin)
        self._ends.append(self._begin + len(words))

    def look_up(self, lists: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """For many words, each given by the number of its list and its place there: its number; -1 for -1."""
        if not len(lists):
            return torch.empty(0, dtype=torch.int64, device="cpu")
        begins, ends = torch.tensor(self._begins, device="cpu"), torch.tensor(self._ends, device="cpu")
        # After the words of each list there is one that is none.
        at = torch.where(places < 0, ends[lists], begins[lists] + places)
        return torch.tensor(self._used, device="cpu")[at]


def _numbers(columns: Iterable["array[int]"]) -> torch.Tensor:
    joined = bytearray().join(columns)
    if not joined:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(joined, dtype=torch.int32).long()
