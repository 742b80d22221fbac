"""Choices: the elements of an action that are one of several classes, beside plain numbers.

An action of the classes (0, 3, 2), a number, a choice of three and one of two, is a flat vector:

    action       [ 0.4   2   0 ]      number, choice, choice
    action_mask  [ 1 0 1   1 1 ]      the classes of one choice after another; 1: allowed

The observation `action_mask`, where an environment has it, says which classes may be chosen now.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from embodied.core.build import ConfigError
from embodied.core.spec import MASK, Spec
from embodied.core.tensors import Tensors


class Choices(nn.Module):
    """The choices and the numbers in the actions of `spec`, for decisions of `chunk` steps.
    `counts` [m]: the classes of each choice, at most K; `numbers`: how many elements are numbers.
    ConfigError for a mask that does not fit the choices, or that would have to hold for more steps
    than the one that it was observed at."""

    count: Tensor  # [m]
    index: Tensor  # [m, K]: the place of each class in the mask
    real: Tensor  # [m, K] (bool): the choice has so many classes
    place: Tensor  # [A]: where in the action the choices, then the numbers stand
    order: Tensor  # [A]: the inverse

    def __init__(self, spec: Spec, chunk: int = 1) -> None:
        super().__init__()
        classes = spec.act.choices
        self.flat = not spec.act.shape  # a single choice, without an axis of elements
        self.counts = tuple(count for count in classes if count)
        self.numbers = len(classes) - len(self.counts)
        self.most = max(self.counts, default=0)
        self.masked = bool(self.counts) and _masked(spec, sum(self.counts))
        if self.masked and chunk > 1:
            raise ConfigError(
                f"{MASK} says what is allowed in the next step only: policy.chunk=1, not {chunk}"
            )
        count = torch.tensor(self.counts, dtype=torch.int64)
        start = (count.cumsum(0) - count)[:, None]
        places = torch.arange(self.most)
        real = places < count[:, None]
        self.limited = self.masked or not bool(real.all())  # some classes cannot be chosen
        chosen = [i for i, many in enumerate(classes) if many]
        place = torch.tensor([*chosen, *(i for i, many in enumerate(classes) if not many)])
        parts = {"count": count, "real": real, "index": torch.where(real, start + places, 0)}
        for name, value in {**parts, "place": place, "order": place.argsort()}.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def width(self) -> int:
        """Elements of `one_hot`."""
        return sum(self.counts) + self.numbers

    def allowed(self, obs: Tensors) -> Tensor:
        """Which classes may be chosen, [n, 1, m, K] (bool), or [m, K] where no mask is observed."""
        if not self.masked:
            return self.real
        return ((obs[MASK].flatten(1) > 0.5)[:, self.index] & self.real)[:, None]

    def split(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """The choices [..., m] (int64) and the numbers [..., A - m] of actions [..., *shape]."""
        ordered = self._ordered(action)
        return ordered[..., : len(self.counts)].long(), ordered[..., len(self.counts) :]

    def join(self, choice: Tensor, numbers: Tensor) -> Tensor:
        if self.flat:
            return choice[..., 0]
        return torch.cat([choice.to(numbers.dtype), numbers], -1)[..., self.order]

    def random(self, uniform: Tensor, obs: Tensors) -> Tensor:
        """Actions [n, H, *shape] from `uniform` [n, H, *shape] in [0, 1): each allowed class is as
        likely, and so is each number in [-1, 1]."""
        ordered = self._ordered(uniform)
        drawn, numbers = ordered[..., : len(self.counts)], ordered[..., len(self.counts) :]
        if not self.masked:
            choice = torch.minimum((drawn * self.count).long(), self.count - 1)
            return self.join(choice, 2 * numbers - 1)
        allowed = self.allowed(obs)
        many = allowed.sum(-1)
        rank = torch.minimum((drawn * many).long(), many - 1)[..., None]  # among the allowed ones
        choice = (allowed & (allowed.cumsum(-1) == rank + 1)).int().argmax(-1)
        return self.join(choice, 2 * numbers - 1)

    def one_hot(self, action: Tensor) -> Tensor:
        """Actions [N, *shape] as [N, width]: the choices one-hot, then the numbers."""
        choice, numbers = self.split(action)
        parts = [functional.one_hot(choice[:, i], k) for i, k in enumerate(self.counts)]
        return torch.cat([*(part.to(numbers.dtype) for part in parts), numbers], 1).float()

    def _ordered(self, action: Tensor) -> Tensor:
        """Choices before numbers, [..., A]."""
        return action[..., None] if self.flat else action[..., self.place]


def _masked(spec: Spec, classes: int) -> bool:
    """Whether `spec` has a mask of all `classes`; ConfigError for one that does not fit."""
    found = {name: leaf.size for name, leaf in spec.obs.items() if name.split("/")[0] == MASK}
    if found and found != {MASK: classes}:
        has = ", ".join(f"{name} with {size} numbers" for name, size in found.items())
        raise ConfigError(
            f"the observation has {has}, and the action has {classes} classes: {MASK} is one array "
            "with a number (1: allowed) for each class, one choice after another"
        )
    return bool(found)
