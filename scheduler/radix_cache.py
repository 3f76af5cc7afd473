"""Which token prefixes already have their keys and values in pages.

A radix tree per namespace, at page granularity: an edge is labelled with the tokens of one or
more whole pages, and two children of a node differ in their first page. Labels are the tokens
themselves (int32, as bytes) and are compared, never hashed into an identity, so a collision
cannot hand out another prompt's pages. A locked node and all its ancestors stay; of the rest,
the least recently used leaf goes first, from its tail. Children are never used later than their
parents, so leaves first is also oldest first. The tree owns the pages it holds: pages leave it
through ``evict`` alone. It knows no request, no free list and no clock (``_tick`` counts uses).
"""

from __future__ import annotations

import heapq

import numpy as np

TOKEN_BYTES = 4  # int32


def common_length(a: bytes, b: bytes) -> int:
    """How many leading bytes are equal."""
    count = min(len(a), len(b))
    differs = np.flatnonzero(np.frombuffer(a, np.uint8, count) != np.frombuffer(b, np.uint8, count))
    return int(differs[0]) if differs.size else count


class Node:
    """The tokens and pages of one edge. Opaque to everybody but RadixCache."""

    __slots__ = ("children", "key", "lock", "namespace", "pages", "parent", "used")

    def __init__(self, namespace: str, parent: Node | None, key: bytes, pages: list[int]) -> None:
        self.namespace = namespace
        self.parent = parent  # None: a root, or no longer in the tree
        self.key = key  # len(pages) * page_size int32 tokens
        self.pages = pages
        self.children: dict[bytes, Node] = {}  # by the first page's tokens
        self.lock = 0  # requests that hold this node or one below it
        self.used = 0


class RadixCache:
    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._tick = 0
        self._heap: list[tuple[int, int, Node]] = []  # leaves that were evictable when pushed
        self._pushes = 0
        self._num_nodes = 0
        self.cached_pages = 0
        self.evictable_pages = 0  # cached pages that no lock protects
        self.evictions = 0  # pages evicted since start

    def probe(self, namespace: str, key: bytes, max_pages: int) -> tuple[int, int]:
        """How many leading pages of ``key`` are cached, at most ``max_pages``, and how many of
        those are evictable now. Does not count as a use."""
        root = self._roots.get(namespace)
        if root is None:
            return 0, 0
        path, partial = self._walk(root, key, max_pages)
        matched = sum(len(node.pages) for node in path)
        evictable = sum(len(node.pages) for node in path if node.lock == 0)
        if partial:
            end = path[-1] if path else root
            at = matched * self._page_bytes
            if end.children[key[at : at + self._page_bytes]].lock == 0:
                evictable += partial
        return matched + partial, evictable

    def lock_prefix(
        self, namespace: str, key: bytes, max_pages: int
    ) -> tuple[Node | None, list[int]]:
        """Locks the longest cached prefix of ``key`` and returns its end and its pages.

        (None, []) if nothing matches. Every node returned must be given to ``unlock`` once.
        """
        root = self._roots.get(namespace)
        if root is None:
            return None, []
        path, partial = self._walk(root, key, max_pages)
        if partial:
            end = path[-1] if path else root
            at = sum(len(node.pages) for node in path) * self._page_bytes
            path.append(self._split(end.children[key[at : at + self._page_bytes]], partial))
        if not path:
            return None, []
        self._touch(path)
        self._lock(path[-1])
        return path[-1], [page for node in path for page in node.pages]

    def insert(self, namespace: str, key: bytes, pages: list[int]) -> tuple[Node, list[int]]:
        """Gives the pages of a computed prefix to the tree, and locks its end.

        ``key`` holds exactly ``len(pages)`` >= 1 whole pages of tokens. Returns the end node
        (to be unlocked once) and the tree's pages for the prefix: where one differs from
        ``pages``, the tree had that page of tokens already and the caller keeps its own.
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, b"", [])
        path, partial = self._walk(root, key, len(pages))
        if partial:
            end = path[-1] if path else root
            at = sum(len(node.pages) for node in path) * self._page_bytes
            path.append(self._split(end.children[key[at : at + self._page_bytes]], partial))
        tree_pages = [page for node in path for page in node.pages]
        have = len(tree_pages)
        if have < len(pages):
            parent = path[-1] if path else root
            leaf = Node(namespace, parent, key[have * self._page_bytes :], pages[have:])
            parent.children[leaf.key[: self._page_bytes]] = leaf
            self._num_nodes += 1
            self.cached_pages += len(leaf.pages)
            self.evictable_pages += len(leaf.pages)
            path.append(leaf)
            tree_pages += leaf.pages
        self._touch(path)
        self._lock(path[-1])
        return path[-1], tree_pages

    def unlock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.lock -= 1
            assert at.lock >= 0, "a prefix was unlocked more often than locked"
            if at.lock == 0:
                self.evictable_pages += len(at.pages)
                if not at.children:
                    self._push(at)
            at = at.parent

    def evict(self, count: int) -> list[int]:
        """Takes up to ``count`` unlocked pages out of the tree, least recently used first."""
        evicted: list[int] = []
        while len(evicted) < count and self._heap:
            used, _, leaf = heapq.heappop(self._heap)
            if not self._is_evictable(leaf, used):
                continue
            take = min(count - len(evicted), len(leaf.pages))
            keep = len(leaf.pages) - take
            evicted += leaf.pages[keep:]
            if keep:
                del leaf.pages[keep:]
                leaf.key = leaf.key[: keep * self._page_bytes]
                self._push(leaf)
            else:
                self._remove(leaf)
        self.cached_pages -= len(evicted)
        self.evictable_pages -= len(evicted)
        self.evictions += len(evicted)
        return evicted

    def _walk(self, root: Node, key: bytes, max_pages: int) -> tuple[list[Node], int]:
        """The nodes wholly matched, and how many pages of the next one match."""
        path: list[Node] = []
        node, at = root, 0
        limit = min(len(key) // self._page_bytes, max_pages) * self._page_bytes
        while at < limit:
            child = node.children.get(key[at : at + self._page_bytes])
            if child is None:
                break
            if at + len(child.key) <= limit and key.startswith(child.key, at):
                path.append(child)
                node, at = child, at + len(child.key)
                continue
            equal = common_length(child.key, key[at:limit])
            return path, equal // self._page_bytes
        return path, 0

    def _split(self, node: Node, at: int) -> Node:
        """Puts the first ``at`` pages of ``node`` into a new parent, and returns that.

        ``node`` itself stays the end of its path, since locks are held by reference to it.
        """
        cut = at * self._page_bytes
        assert node.parent is not None
        upper = Node(node.namespace, node.parent, node.key[:cut], node.pages[:at])
        upper.lock, upper.used = node.lock, node.used
        node.parent.children[upper.key[: self._page_bytes]] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[at:]
        upper.children[node.key[: self._page_bytes]] = node
        self._num_nodes += 1
        return upper

    def _touch(self, path: list[Node]) -> None:
        self._tick += 1
        for node in path:
            node.used = self._tick

    def _lock(self, node: Node) -> None:
        at = node
        while at.parent is not None:
            if at.lock == 0:
                self.evictable_pages -= len(at.pages)
            at.lock += 1
            at = at.parent

    def _is_evictable(self, node: Node, used: int) -> bool:
        return (
            node.used == used and node.lock == 0 and not node.children and node.parent is not None
        )

    def _push(self, leaf: Node) -> None:
        # Entries of leaves that were used again go stale in the heap: drop them before they
        # outnumber the live ones.
        if len(self._heap) > 2 * self._num_nodes + 64:
            self._heap = [entry for entry in self._heap if self._is_evictable(entry[2], entry[0])]
            heapq.heapify(self._heap)
        self._pushes += 1
        heapq.heappush(self._heap, (leaf.used, self._pushes, leaf))

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key[: self._page_bytes]]
        leaf.parent = None
        self._num_nodes -= 1
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.namespace]
        elif parent.lock == 0:
            self._push(parent)

    def check(self) -> list[int]:
        """All pages of the tree. Raises AssertionError where its books contradict each other."""
        pages: list[int] = []
        evictable = nodes = 0
        for namespace, root in self._roots.items():
            assert root.children, f"empty root of namespace {namespace!r}"
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                nodes += 1
                assert node.parent is not None and node.pages
                assert len(node.key) == len(node.pages) * self._page_bytes
                assert node.parent.children[node.key[: self._page_bytes]] is node
                assert node.lock >= sum(child.lock for child in node.children.values())
                assert all(child.used <= node.used for child in node.children.values())
                pages += node.pages
                evictable += 0 if node.lock else len(node.pages)
                stack += node.children.values()
        assert nodes == self._num_nodes
        assert evictable == self.evictable_pages
        assert len(pages) == self.cached_pages == len(set(pages))
        return pages
