"""Tree search in a learned model by PUCT, from a batch of roots (MuZero, 2020).

Each simulation goes down from the root by

    argmax_k  Q(s, k) + P(s, k) sqrt(N(s)) / (1 + N(s, k)) (c_1 + log((N(s) + c_2 + 1) / c_2)),

adds the node that it comes to, and adds the value there, discounted, to the edges on the way. Q is
scaled to [0, 1] by the smallest and largest Q in its tree, or by `span` where they are nearer, so
that errors of the model decide nothing; an edge that was not tried has Q = 0. A node has `width` of
the actions, which are drawn by their probabilities without replacement (the Gumbel trick), and P is
the policy among them (Sampled MuZero; Hubert et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.core.tensors import Tensors

C1, C2 = 1.25, 19_652.0
# Of states [n, ...]: logits [n, C] of the actions, and values [n].
Predict = Callable[[Tensors], tuple[Tensor, Tensor]]
# Of states and actions [n]: the next states, rewards [n], and the discounts [n] of what follows.
Expand = Callable[[Tensors, Tensor], tuple[Tensors, Tensor, Tensor]]


@dataclass
class Tree:
    """n trees of at most M nodes with K edges each; node 0 is the root."""

    states: Tensors  # [n, M, ...]
    action: Tensor  # [n, M, K] of each edge
    prior: Tensor  # [n, M, K]
    visits: Tensor  # [n, M, K]
    total: Tensor  # [n, M, K] sum of the returns that went over an edge
    child: Tensor  # [n, M, K] the node that an edge leads to; 0: none yet
    reward: Tensor  # [n, M] on the way to a node
    discount: Tensor  # [n, M] of what follows it
    parent: Tensor  # [n, M]
    edge: Tensor  # [n, M] the parent's edge to a node


def search(
    root: Tensors,
    logits: Tensor,
    predict: Predict,
    expand: Expand,
    simulations: int,
    width: int,
    span: float,
    gumbel: Tensor,
) -> tuple[Tensor, Tensor]:
    """The visits [n, C] of the actions at the roots after `simulations`, and the roots' values [n].

    `root`: states [n, ...]; `logits` [n, C]: the policy there; `gumbel` [n, simulations + 1, C]
    draws the actions of each node.
    """
    n, count = logits.shape
    tree = planted(root, n, simulations + 1, min(width, count))
    every = torch.arange(n, device=logits.device)
    add_node(tree, 0, root, logits, gumbel[:, 0])
    for number in range(1, simulations + 1):
        node, edge = descended(tree, every, span)
        state = {name: value[every, node] for name, value in tree.states.items()}
        following, reward, discount = expand(state, tree.action[every, node, edge])
        logits, value = predict(following)
        add_node(tree, number, following, logits, gumbel[:, number])
        tree.parent[:, number] = node
        tree.edge[:, number] = edge
        tree.reward[:, number] = reward
        tree.discount[:, number] = discount
        tree.child[every, node, edge] = number
        back_up(tree, every, number, value)
    visits = torch.zeros(n, count, device=logits.device)
    visits.scatter_add_(1, tree.action[:, 0], tree.visits[:, 0])
    return visits, tree.total[:, 0].sum(1) / simulations


def planted(root: Tensors, n: int, nodes: int, width: int) -> Tree:
    """Trees without nodes."""
    states = {k: v.new_zeros(n, nodes, *v.shape[1:]) for k, v in root.items()}
    like = next(value for value in root.values() if value.is_floating_point())
    numbers = [like.new_zeros(n, nodes, width) for _ in range(3)]
    whole = torch.zeros(n, nodes, width, dtype=torch.int64, device=like.device)
    prior, visits, total = numbers
    return Tree(
        states,
        action=whole,
        prior=prior,
        visits=visits,
        total=total,
        child=whole.clone(),
        reward=like.new_zeros(n, nodes),
        discount=like.new_zeros(n, nodes),
        parent=whole[:, :, 0].clone(),
        edge=whole[:, :, 0].clone(),
    )


def add_node(tree: Tree, number: int, state: Tensors, logits: Tensor, gumbel: Tensor) -> None:
    """Set the state of the nodes `number`, and their edges by the policy's `logits` [n, C]."""
    for name, value in state.items():
        tree.states[name][:, number] = value
    drawn = (logits + gumbel).topk(tree.action.shape[2], dim=1).indices
    tree.action[:, number] = drawn
    tree.prior[:, number] = logits.gather(1, drawn).softmax(1)


def descended(tree: Tree, every: Tensor, span: float) -> tuple[Tensor, Tensor]:
    """The nodes [n] and edges [n] at which the trees grow next."""
    tried = tree.visits > 0
    q = torch.where(tried, tree.total / tree.visits.clamp(min=1), 0.0)
    low = torch.where(tried, q, torch.inf).flatten(1).amin(1)[:, None, None]
    high = torch.where(tried, q, -torch.inf).flatten(1).amax(1)[:, None, None]
    scaled = torch.where(tried, (q - low) / (high - low).clamp(min=span), 0.0)
    total = tree.visits.sum(2, keepdim=True)
    rate = C1 + torch.log((total + C2 + 1) / C2)
    score = scaled + tree.prior * total.clamp(min=1e-6).sqrt() / (1 + tree.visits) * rate
    best = score.argmax(2)
    node = torch.zeros_like(every)
    for _ in range(tree.child.shape[1]):
        following = tree.child[every, node, best[every, node]]
        if none(following > 0):
            break
        node = torch.where(following > 0, following, node)
    return node, best[every, node]


def back_up(tree: Tree, every: Tensor, number: int, value: Tensor) -> None:
    """Add the returns from the nodes `number`, whose values are `value` [n], to their ancestors'
    edges."""
    node = torch.full_like(every, number)
    returns = value
    for _ in range(number):
        on_way = node > 0
        if none(on_way):
            break
        parent, edge = tree.parent[every, node], tree.edge[every, node]
        returns = tree.reward[every, node] + tree.discount[every, node] * returns
        tree.visits[every, parent, edge] += on_way
        tree.total[every, parent, edge] += on_way * returns
        node = torch.where(on_way, parent, node)


def none(mask: Tensor) -> bool:
    """Whether no tree goes on; false on a GPU, where to know it would mean to wait."""
    return mask.device.type == "cpu" and not bool(mask.any())


def gumbel_like(uniform: Tensor) -> Tensor:
    """Standard Gumbel numbers of `uniform` ones in (0, 1); 0 where they are 1 / e."""
    return -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))


NONE = math.exp(-1.0)  # the uniform number whose Gumbel number is 0
