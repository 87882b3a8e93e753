"""Prefix trees of token sequences: what sequences have in common is one segment, computed once.

A tree has a node for each run of tokens that some sequences share and others do not, as a radix tree. Sequences are
compared token by token, whatever they are: completions of one prompt, prompts that begin with one document, turns of
one conversation. Sequences of different *domains* share nothing, since equal tokens can mean different images there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from starling.algo import packing
from starling.algo.attention.forest import Forest, Index
from starling.policy.train.data.groups import IntArray

MIN_SAVED_TOKENS: Final = 16
"""Tokens that a segment of a tree must save: a segment costs as much time as a few tokens."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens of one or more sequences."""

    start: int
    """Position of its first token in its sequences."""
    end: int
    sequence: int
    """One of those that contain it."""
    children: list[Node] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    """Sequences that end with it."""
    num_sequences: int = 0
    """That contain it."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixForest:
    """The segments of some sequences in preorder."""

    forest: Forest
    sources: tuple[tuple[int, int, int], ...]
    """Tokens of each segment: those of a sequence from a position to another."""
    last_segments: dict[int, int]
    """Segment with which each sequence ends."""


def build_trees(paths: Sequence[IntArray], domains: Sequence[int]) -> list[Node]:
    """Return the roots of the prefix trees; nodes are in the order of the first sequence that contains them.

    Args:
        paths: tokens of each sequence, at least one.
        domains: of each sequence; negative for one in which every shared token counts, whatever a segment costs.
    """
    lengths = np.array([len(path) for path in paths], dtype=np.int64)
    ends = np.cumsum(lengths)
    tokens = np.concatenate(paths)
    # Big-endian bytes have the order of the token ids, and Python compares them fast.
    data = tokens.astype(">i4").tobytes()
    keys = [data[4 * start : 4 * end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
    ordered = sorted(range(len(paths)), key=lambda n: (domains[n], keys[n], n))
    common_lengths = _common_prefixes(tokens, ends - lengths, lengths, ordered, domains)
    if not any(common_lengths):
        return [Node(0, len(path), n, members=[n], num_sequences=1) for n, path in enumerate(paths)]
    roots: list[Node] = []
    stack: list[Node] = []  # the nodes of the sequence before
    for number, common in zip(ordered, common_lengths, strict=True):
        while stack and stack[-1].start >= common:
            stack.pop()
        if stack and stack[-1].end > common:
            _cut(stack[-1], common)
        if stack and len(paths[number]) == common:
            stack[-1].members.append(number)
            continue
        node = Node(common, len(paths[number]), number, members=[number])
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    for node in reversed(_preorder(roots)):
        node.num_sequences = len(node.members) + sum(child.num_sequences for child in node.children)
    root = Node(0, 0, 0, children=roots)
    for node in (found := _keep_worthwhile(root, domains)):
        node.sequence = min((*node.members, *(child.sequence for child in node.children)))
        node.children.sort(key=lambda child: child.sequence)
    assert found[-1] is root
    return root.children


def divide(trees: Sequence[Node], budget: int) -> list[list[int]]:
    """Divide sequences over microbatches of at most `budget` tokens so that few prefixes are computed twice.

    From the leaves up, the subtrees of a node are put together, by first fit decreasing, as long as they fit with all
    tokens above them; what exceeds the budget is cut, and what is above a cut is computed on both sides. A sequence
    longer than the budget is beside none but its own beginnings.
    """
    nodes = _preorder(trees)
    if sum(node.end - node.start for node in nodes) <= budget:
        return [sorted(member for node in nodes for member in node.members)]
    bins: dict[int, list[tuple[int, list[int]]]] = {}
    for node in reversed(nodes):  # children first
        own, room = node.end - node.start, budget - node.end
        items = [(0, [member]) for member in node.members]
        items += [item for child in node.children for item in bins.pop(id(child))]
        bins[id(node)] = [(own + size, members) for size, members in _fit(items, room)]
    return [sorted(members) for _, members in _fit([item for tree in trees for item in bins[id(tree)]], budget)]


def restrict(trees: Sequence[Node], numbers: Sequence[int]) -> PrefixForest:
    """Return the segments of the sequences `numbers` in preorder."""
    nodes = _preorder(trees)
    members = {id(node): node.members for node in nodes}
    children = {id(node): node.children for node in nodes}
    if len(numbers) < sum(map(len, members.values())):
        chosen = set(numbers)
        for node in reversed(nodes):
            members[id(node)] = [member for member in node.members if member in chosen]
            children[id(node)] = [one for one in node.children if members[id(one)] or children[id(one)]]
    lengths, parents, sources = list[int](), list[int](), list[tuple[int, int, int]]()
    last_segments: dict[int, int] = {}
    work = [(node, -1) for node in reversed(trees) if members[id(node)] or children[id(node)]]
    while work:
        node, parent = work.pop()
        start = node.start
        while not (own := members[id(node)]) and len(children[id(node)]) == 1:
            node = children[id(node)][0]
        number = len(lengths)
        lengths.append(node.end - start)
        parents.append(parent)
        sources.append((node.sequence, start, node.end))
        for member in own:
            last_segments[member] = number
        work += [(child, number) for child in reversed(children[id(node)])]
    return PrefixForest(Forest(tuple(lengths), tuple(parents)), tuple(sources), last_segments)


def _fit(items: Sequence[tuple[int, list[int]]], room: int) -> list[tuple[int, list[int]]]:
    """Put items (tokens, sequences) together as long as they fit into `room`."""
    filled = [(size, members) for size, members in items if size]
    total = sum(size for size, _ in filled)
    if total <= room or not filled:
        return [(total, [member for _, members in items for member in members])]
    empty = [members for size, members in items if not size]
    rows = packing.pack([size for size, _ in filled], max(room, 1))
    found = [(sum(filled[i][0] for i in row), [member for i in row for member in filled[i][1]]) for row in rows]
    found[0][1].extend(member for members in empty for member in members)
    return found


def _common_prefixes(
    tokens: IntArray, starts: Index, lengths: Index, ordered: Sequence[int], domains: Sequence[int]
) -> list[int]:
    """Return how many tokens each sequence has in common with the one before it; 0 for the first."""
    order, kinds = np.array(ordered, dtype=np.int64), np.array(domains, dtype=np.int64)[ordered]
    compared = np.minimum(lengths[order[:-1]], lengths[order[1:]]) * (kinds[:-1] == kinds[1:])
    found = np.zeros(len(ordered), dtype=np.int64)
    if some := np.flatnonzero(compared).tolist():
        sizes = compared[some]
        begins = np.cumsum(sizes) - sizes
        offsets = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(begins, sizes)
        first, second = (tokens[offsets + np.repeat(starts[one][some], sizes)] for one in (order[:-1], order[1:]))
        differs = np.where(first != second, offsets, len(offsets))
        found[1:][some] = np.minimum(np.minimum.reduceat(differs, begins), sizes)
    return found.tolist()


def _cut(node: Node, position: int) -> None:
    """Cut a node in two; the lower part takes its children."""
    lower = Node(position, node.end, node.sequence, children=node.children, members=node.members)
    node.end, node.children, node.members = position, [lower], []


def _preorder(roots: Sequence[Node]) -> list[Node]:
    found, work = list[Node](), [*roots]
    while work:
        found.append(node := work.pop())
        work += node.children
    return found


def _keep_worthwhile(root: Node, domains: Sequence[int]) -> list[Node]:
    """Give the tokens of nodes that save too few to their children, from the root down. Returns all, children first."""
    found, queue = list[Node](), [root]
    while queue:
        found.append(node := queue.pop())
        kept, work = list[Node](), node.children
        while work:
            child = work.pop()
            saved = (child.num_sequences - 1) * (child.end - child.start)
            if not child.children or saved >= MIN_SAVED_TOKENS or domains[child.sequence] < 0:
                kept.append(child)
                continue
            if child.members:
                work.append(Node(child.start, child.end, child.sequence, [], child.members, len(child.members)))
            for grandchild in child.children:
                grandchild.start = child.start
            work += child.children
        node.children = kept
        queue += kept
    return found[::-1]
